"""Time of device work by CUDA events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from .record import NOT_A_TIMING

CACHE_BYTES = 256 * 2**20  # several times the L2 cache of an H100 (50 MB) or H200 (60 MB)


def times(
    run: Callable[[], object],
    *,
    timed: bool,
    draw: Callable[[], object] = lambda: None,
    most: int = 30,
    budget_s: float = 3.0,
) -> dict[str, Any]:
    """Return milliseconds of `run`: the medians of two passes, whose distance is the spread, and the extremes.

    `draw` is called before each run, outside of its time. Without `timed` it runs once.
    """
    begin = time.perf_counter()
    draw()
    run()  # compiles kernels, makes handles
    if not timed:
        return {"timed": False, "note": NOT_A_TIMING, "interpreter_s": round(time.perf_counter() - begin, 3)}
    import torch

    draw()
    run()

    torch.cuda.synchronize()
    begin = time.perf_counter()
    draw()
    run()
    torch.cuda.synchronize()
    rounds = max(2, min(most, int(budget_s / 2 / (time.perf_counter() - begin))))
    passes = [events(run, draw, rounds) for _ in range(2)]
    return {
        "timed": True,
        "rounds": rounds,
        "ms": [statistics.median(found) for found in passes],
        "least_ms": min(map(min, passes)),
        "most_ms": max(map(max, passes)),
    }


def events(run: Callable[[], object], draw: Callable[[], object], rounds: int) -> list[float]:
    """Return milliseconds of each round, by events on the current stream.

    What is written between the rounds pushes the last one's data out of the cache, and gives the host time to be ahead:
    else a short run would end with the launch of its own last kernel.
    """
    import torch

    cache = torch.empty(CACHE_BYTES // 4, dtype=torch.float32, device="cuda")
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, end in pairs:
        draw()
        cache.fill_(1.0)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [float(start.elapsed_time(end)) for start, end in pairs]
