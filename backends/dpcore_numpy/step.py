"""Noise, filter and update in one pass over memory: the plain operations, a few tiles at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.check import check_step
from dpcore.spec.ops import FilterCoefficients, NoiseRow, Slot, UpdateSettings
from dpcore.spec.stream import TILE
from dpcore.validate import integer
from dpcore_numpy.filter import recurrence
from dpcore_numpy.noise import normal
from dpcore_numpy.update import update

Floats = NDArray[Any]

# Large enough for NumPy's calls, which hold the interpreter's lock, to cost little beside their work: at 16 tiles
# asv_benchmarks/step_vs_opacus.py takes twice as long on two threads.
_PIECE = 64 * TILE

# glibc maps and clears fresh pages for every temporary array above a size that it raises only when a larger block is
# freed. Freeing one untouched block of 16 MiB raises it for good. A process that frees no such block itself (NumPy
# alone, without torch) takes twice as long when this line is gone.
np.empty(1 << 24, dtype=np.uint8)


def step(
    slots: Sequence[Slot[Floats]],
    noise: NoiseRow,
    batch_size: float,
    coefficients: FilterCoefficients,
    rule: str,
    settings: Sequence[UpdateSettings],
    step_number: int,
) -> None:
    """See `dpcore.spec.ops.Backend.step`.

    Threads: ``DPCORE_NUM_THREADS`` as it is when this backend is loaded, by default every core of the process.
    """
    check_step(slots, noise, batch_size, coefficients, rule, settings, step_number)
    pieces: list[Callable[[], None]] = []
    for slot, numbers in zip(slots, settings, strict=True):
        for start in range(0, slot.parameter.size, _PIECE):
            piece = _slice(slot, start, min(start + _PIECE, slot.parameter.size))
            pieces.append(partial(_step_piece, piece, noise, batch_size, coefficients, rule, numbers, step_number))
    if len(pieces) < 4 or THREADS == 1:
        for run in pieces:
            run()
    else:
        _run_all(pieces)


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


def _step_piece(
    slot: Slot[Floats],
    noise: NoiseRow,
    batch_size: float,
    coefficients: FilterCoefficients,
    rule: str,
    settings: UpdateSettings,
    step_number: int,
) -> None:
    x, total = slot.parameter, slot.total
    if noise.scale:
        g = normal(noise.key, noise.row, noise.stream, slot.first, x.size, dtype=total.dtype.name, rng=noise.rng)
        g *= noise.scale
        g += total
        g /= batch_size
    else:
        g = total / batch_size
    y = recurrence(g, slot.filter_state, coefficients)
    if slot.displacement is None:
        update(rule, x, y, slot.moments, settings, step_number)
    else:
        before = x.copy()
        update(rule, x, y, slot.moments, settings, step_number)
        slot.displacement[...] = x - before


def _slice(slot: Slot[Floats], start: int, stop: int) -> Slot[Floats]:
    def cut(array: Floats) -> Floats:
        return array.reshape(-1)[start:stop]

    return Slot(
        parameter=cut(slot.parameter),
        total=cut(slot.total),
        first=slot.first + start,
        filter_state=tuple(cut(vector) for vector in slot.filter_state),
        moments=tuple(cut(vector) for vector in slot.moments),
        displacement=None if slot.displacement is None else cut(slot.displacement),
    )


def _threads() -> int:
    chosen = os.environ.get("DPCORE_NUM_THREADS")
    if chosen is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return integer(1, DPCORE_NUM_THREADS=int(chosen) if chosen.isdigit() else chosen)


THREADS = _threads()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the pool of one process: threads do not survive a fork."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix=f"dpcore-step-{process}")
