"""Noise, filter and update in one pass over memory: the plain operations, a few tiles at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.check import check_step, order_of
from dpcore.spec.ops import FilterCoefficients, NoiseRow, Slot, UpdateSettings
from dpcore.spec.stream import TILE
from dpcore.spec.validate import integer
from dpcore_numpy.filter import recurrence
from dpcore_numpy.noise import normal
from dpcore_numpy.update import update

Floats = NDArray[Any]

# glibc maps and clears fresh pages for every temporary array above a size that it raises only when a larger block is
# freed. Freeing one untouched block of 16 MiB raises it for good. A process that frees no such block itself (NumPy
# alone, without torch) takes twice as long when this line is gone.
np.empty(1 << 24, dtype=np.uint8)


def step(
    slots: Sequence[Slot[Floats]],
    noise: NoiseRow,
    batch_size: float,
    filters: Sequence[FilterCoefficients],
    rule: str,
    settings: Sequence[UpdateSettings],
    step_number: int,
    *,
    correlation: FilterCoefficients | None = None,
    square: str = "filtered",
    square_noise: NoiseRow | None = None,
) -> None:
    """See `dpcore.spec.ops.Backend.step`.

    Threads: ``DPCORE_NUM_THREADS`` as it is when this backend is loaded, by default every core of the process.
    """
    check_step(
        slots, noise, batch_size, filters, rule, settings, step_number, correlation, square, square_noise
    )  # fmt: skip

    def run(slot: Slot[Floats], numbers: UpdateSettings) -> None:
        g = _average(slot, noise, batch_size, correlation)
        y = _filtered(g, slot, filters)
        h = None if square == "filtered" else _square(g, slot, batch_size, square, square_noise)
        before = None if slot.displacement is None else slot.parameter.copy()
        update(rule, slot.parameter, y, slot.moments, numbers, step_number, h)
        if slot.displacement is not None:
            slot.displacement[...] = slot.parameter - before

    pieces: list[Callable[[], None]] = []
    for slot, numbers in zip(slots, settings, strict=True):
        for start in range(0, slot.parameter.size, _PIECE):
            piece = _slice(slot, start, min(start + _PIECE, slot.parameter.size))
            pieces.append(lambda piece=piece, numbers=numbers: run(piece, numbers))  # type: ignore[misc]
    if len(pieces) < 4 or THREADS == 1:
        for work in pieces:
            work()
    else:
        _run_all(pieces)


def _normals(noise: NoiseRow, slot: Slot[Floats]) -> Floats:
    kind = slot.parameter.dtype.name
    return normal(noise.key, noise.row, noise.stream, slot.first, slot.total.size, dtype=kind, rng=noise.rng)


def _average(slot: Slot[Floats], noise: NoiseRow, batch_size: float, correlation: FilterCoefficients | None) -> Floats:
    if noise.scale:
        n = _normals(noise, slot)
        if correlation is not None:
            n = recurrence(n, slot.noise_state, correlation)
        average = n.astype(np.float64)
        average *= noise.scale
        average += slot.total
        average /= batch_size
    else:
        average = slot.total / batch_size
    g: Floats = average.astype(slot.parameter.dtype, copy=False)
    if slot.scale is not None:
        g /= slot.scale
    return g


def _filtered(g: Floats, slot: Slot[Floats], filters: Sequence[FilterCoefficients]) -> Floats:
    y, done = g, 0
    for coefficients in filters:
        order = order_of(coefficients)
        y = recurrence(y, slot.filter_state[done : done + order], coefficients)
        done += order
    return y


def _square(g: Floats, slot: Slot[Floats], batch_size: float, square: str, square_noise: NoiseRow | None) -> Floats:
    if square == "released":
        return g * g
    if square == "given":
        assert slot.square is not None
        return slot.square
    q = slot.total / batch_size
    if slot.scale is not None:
        q /= slot.scale
    h = q * q
    if square_noise is not None and square_noise.scale:
        h += np.multiply(_normals(square_noise, slot), square_noise.scale, dtype=np.float64)
    rounded: Floats = h.astype(slot.parameter.dtype, copy=False)
    return rounded


def _run_all(pieces: list[Callable[[], None]]) -> None:
    """Run the pieces on all threads, and return or raise only when none of them is at work any more."""
    running = [_pool(os.getpid()).submit(run) for run in pieces]
    try:
        for piece in running:
            piece.result()
    finally:
        # After an interruption too: a straggler must not read the next step's sum.
        for piece in running:
            piece.cancel()
        wait(running)


def _slice(slot: Slot[Floats], start: int, stop: int) -> Slot[Floats]:
    def cut(array: Floats) -> Floats:
        return array.reshape(-1)[start:stop]

    return Slot(
        parameter=cut(slot.parameter),
        total=cut(slot.total),
        first=slot.first + start,
        filter_state=tuple(map(cut, slot.filter_state)),
        moments=tuple(map(cut, slot.moments)),
        displacement=None if slot.displacement is None else cut(slot.displacement),
        noise_state=tuple(map(cut, slot.noise_state)),
        scale=None if slot.scale is None else cut(slot.scale),
        square=None if slot.square is None else cut(slot.square),
    )


def _threads() -> int:
    chosen = os.environ.get("DPCORE_NUM_THREADS")
    if chosen is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return integer(1, DPCORE_NUM_THREADS=int(chosen) if chosen.isdigit() else chosen)


THREADS = _threads()

# An eighth of a million float64 numbers stay in a processor's cache. With threads pieces are larger, so that NumPy's calls,
# which hold the interpreter's lock, cost little beside their work.
_PIECE = (32 if THREADS == 1 else 64) * TILE


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the pool of one process: threads do not survive a fork."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix=f"dpcore-step-{process}")
