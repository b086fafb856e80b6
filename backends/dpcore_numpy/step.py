"""Noise, filter and update in one pass over memory: the plain operations, a few tiles at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.check import check_step, order_of
from dpcore.spec.grid import nearest, released, step_of
from dpcore.spec.ops import Correlation, FilterCoefficients, NoiseRow, Slot, UpdateSettings
from dpcore.spec.stream import TILE
from dpcore_numpy.correlate import correlate
from dpcore_numpy.filter import recurrence
from dpcore_numpy.noise import normal
from dpcore_numpy.update import move

Floats = NDArray[Any]

_PIECE = 16 * TILE  # its numbers stay in a processor's cache

# glibc maps and clears fresh pages for every temporary array above a threshold, which it raises only when a larger
# block is freed. Freeing one untouched block of 16 MiB raises it permanently. Without this line a process that frees no
# such block itself (NumPy alone, without torch) takes twice as long.
np.empty(1 << 24, dtype=np.uint8)


@np.errstate(over="ignore", invalid="ignore")  # if training diverges, the parameters show it, as under other backends
def step(
    slots: Sequence[Slot[Floats]],
    noise: NoiseRow,
    batch_size: float,
    filters: Sequence[FilterCoefficients],
    rule: str,
    settings: Sequence[UpdateSettings],
    step_number: int,
    *,
    unit: float,
    correlation: Correlation | None = None,
    square: str = "filtered",
    square_noise: NoiseRow | None = None,
) -> None:
    """See `dpcore.spec.ops.Backend.step`."""
    check_step(
        slots, noise, batch_size, filters, rule, settings, step_number, unit, correlation, square, square_noise
    )  # fmt: skip

    for whole, numbers in zip(slots, settings, strict=True):
        for start in range(0, whole.parameter.size, _PIECE):
            slot = _slice(whole, start, min(start + _PIECE, whole.parameter.size))
            g = _average(slot, noise, unit / batch_size, correlation)
            y = filtered(g, slot, filters)
            h = None if square == "filtered" else _square(g, slot, unit / batch_size, square, square_noise)
            before = None if slot.displacement is None else slot.parameter.copy()
            move(rule, slot.parameter, y, slot.moments, numbers, step_number, h)
            if slot.displacement is not None:
                slot.displacement[...] = slot.parameter - before


def _normals(noise: NoiseRow, slot: Slot[Floats]) -> Floats:
    key, row, stream, _, rng, bits = noise
    return normal(key, row, stream, slot.first, slot.total.size, bits=bits, rng=rng)


def _average(slot: Slot[Floats], noise: NoiseRow, factor: float, correlation: Correlation | None) -> Floats:
    if noise.scale:
        m = _normals(noise, slot)
        if correlation is not None:
            m = correlate(m, slot.noise_state, correlation, bits=noise.bits)
        average = released(slot.total, m, noise.bits, factor)
    else:
        average = slot.total * factor
    g: Floats = average.astype(slot.parameter.dtype, copy=False)
    if slot.scale is not None:
        g /= slot.scale
    return g


def filtered(g: Any, slot: Slot[Any], filters: Sequence[FilterCoefficients]) -> Any:
    """Return what the filters make of an average, one after the other; torch's tensors, too."""
    y, done = g, 0
    for coefficients in filters:
        order = order_of(coefficients)
        y = recurrence(y, slot.filter_state[done : done + order], coefficients)
        done += order
    return y


def _square(g: Floats, slot: Slot[Floats], factor: float, square: str, square_noise: NoiseRow | None) -> Floats:
    if square == "released":
        return g * g
    if square == "given":
        assert slot.square is not None
        return slot.square
    q = slot.total * factor
    if slot.scale is not None:
        q /= slot.scale
    h = q * q
    if square_noise is not None and square_noise.scale:
        u = step_of(square_noise.scale, square_noise.bits)
        h = released(nearest(h * (1 / u)), _normals(square_noise, slot), square_noise.bits, u)
    rounded: Floats = h.astype(slot.parameter.dtype, copy=False)
    return rounded


def _slice(slot: Slot[Floats], start: int, stop: int) -> Slot[Floats]:
    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        return value.reshape(-1)[start:stop] if isinstance(value, np.ndarray) else value

    return Slot._make(map(cut, slot))._replace(first=slot.first + start)
