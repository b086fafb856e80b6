"""Noise, filter and update in one pass over memory: `dpcore_numpy.step` in torch's threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dpcore.spec.check import check_step
from dpcore.spec.grid import nearest, step_of
from dpcore.spec.ops import Correlation, FilterCoefficients, NoiseRow, Slot, UpdateSettings
from dpcore.spec.stream import TILE
from dpcore_numpy.correlate import correlate
from dpcore_numpy.step import filtered
from dpcore_torch.noise import integers
from dpcore_torch.update import move

# Tiles that a thread takes at once: their float64 numbers stay in its processor's cache.
_TILES = 32


def step(
    slots: Sequence[Slot[torch.Tensor]],
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
    draw: Callable[..., torch.Tensor] = integers,
) -> None:
    """See `dpcore.spec.ops.Backend.step`; `draw` is `integers` or another function of its arguments."""
    check_step(
        slots, noise, batch_size, filters, rule, settings, step_number, unit, correlation, square, square_noise
    )  # fmt: skip
    size = _TILES * TILE * torch.get_num_threads()
    draws, square_draws = (Draws(row, slots, size, draw) for row in (noise, square_noise))
    for whole, numbers in zip(slots, settings, strict=True):
        for start in range(0, whole.parameter.numel(), size):
            slot = _slice(whole, start, start + size)
            g = _average(slot, draws, unit / batch_size, correlation)
            y = filtered(g, slot, filters)
            h = None if square == "filtered" else _square(g, slot, unit / batch_size, square, square_draws)
            if slot.displacement is not None:
                slot.displacement.copy_(slot.parameter)
            move(rule, slot.parameter, y, slot.moments, numbers, step_number, h)
            if slot.displacement is not None:
                torch.sub(slot.parameter, slot.displacement, out=slot.displacement)


class Draws:
    """A row's integers, drawn for several small tensors at once: a call costs more than their numbers."""

    def __init__(
        self, row: NoiseRow | None, slots: Sequence[Slot[torch.Tensor]], size: int, draw: Callable[..., torch.Tensor]
    ) -> None:
        self.row, self._draw = row, draw
        self.scale, self.bits = (0.0, 0) if row is None else (row.scale, row.bits)
        self._size = size
        self._end = max((slot.first + slot.parameter.numel() for slot in slots), default=0)
        self._first, self._drawn = 0, torch.empty(0, dtype=torch.float64, device="cpu")

    def of(self, slot: Slot[torch.Tensor]) -> torch.Tensor:
        """Return the slot's integers, which lie beside other slots': to be read only."""
        assert self.row is not None
        first, size = slot.first, slot.parameter.numel()
        if not (self._first <= first and first + size <= self._first + len(self._drawn)):
            key, row, stream, _, rng, bits = self.row
            ahead = max(size, min(self._size, self._end - first))
            self._first, self._drawn = first, self._draw(key, row, stream, first, ahead, bits=bits, rng=rng)
        return self._drawn[first - self._first :][:size]


def _average(slot: Slot[torch.Tensor], noise: Draws, factor: float, correlation: Correlation | None) -> torch.Tensor:
    if noise.scale:
        m = noise.of(slot)
        if correlation is not None:
            unit = 2.0**-noise.bits
            m = correlate(m * unit, slot.noise_state, correlation, bits=noise.bits) / unit
        average = (m + slot.total).mul_(factor)  # `dpcore.spec.grid.released`
    else:
        average = slot.total * factor
    g: torch.Tensor = average.to(slot.parameter.dtype)
    return g if slot.scale is None else g.div_(slot.scale)


def _square(g: torch.Tensor, slot: Slot[torch.Tensor], factor: float, square: str, square_noise: Draws) -> torch.Tensor:
    if square == "released":
        return g * g
    if square == "given":
        assert slot.square is not None
        return slot.square
    q = slot.total * factor
    if slot.scale is not None:
        q.div_(slot.scale)
    h: torch.Tensor = q * q
    if square_noise.scale:
        u = step_of(square_noise.scale, square_noise.bits)
        h = (nearest(h * (1 / u)) + square_noise.of(slot)).mul_(u)
    return h.to(slot.parameter.dtype)


def _slice(slot: Slot[torch.Tensor], start: int, stop: int) -> Slot[torch.Tensor]:
    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        return value.detach().view(-1)[start:stop] if isinstance(value, torch.Tensor) else value

    return Slot._make(map(cut, slot))._replace(first=slot.first + start)
