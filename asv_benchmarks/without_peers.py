"""Time what no other library does for the same problem: certified random allocation, and searches over many steps.

    python asv_benchmarks/without_peers.py --output asv_benchmarks/recorded/without_peers.json

Beside each time stands how far the answer may be from the truth: the width of the certified interval, or the distance
from the least error of any mechanism. The least of three times, caches emptied; of searches over many steps one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from dpcore import accounting, strategies
from dpcore.accounting.pld import allocation, intervals

# noise multiplier, batches, epochs, delta
ALLOCATIONS = ((1.0, 8, 1, 1e-8), (1.0, 64, 1, 1e-8), (2.0, 64, 1, 1e-8), (1.0, 128, 1, 1e-8), (1.0, 235, 10, 1e-5),
    (0.6, 1000, 10, 1e-5), (1.0, 10_000, 10, 1e-7))  # fmt: skip
SEARCHES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "blt, 4 buffers, a million steps": ("blt", 10**6, {}),
    "dense, 1,026 steps, six epochs": ("dense", 1026, {"epochs": 6, "tolerance": 1e-5}),
}


def forget() -> None:
    """Empty the caches."""
    for module in (allocation, intervals):
        for part in vars(module).values():
            if hasattr(part, "cache_clear"):
                part.cache_clear()


def allocated(noise_multiplier: float, batches: int, epochs: int, delta: float) -> dict[str, Any]:
    """Time one interval."""
    event, times = accounting.RandomAllocationGaussian(batches, noise_multiplier, epochs), []
    for _ in range(3):
        forget()
        begun = time.perf_counter()
        found = accounting.epsilon_interval(event, delta)
        times.append(time.perf_counter() - begun)
    return {**event.to_dict(), "delta": delta, "interval": list(found), "seconds": min(times)}


def searched(name: str) -> dict[str, Any]:
    """Time one search."""
    kind, steps, options = SEARCHES[name]
    begun = time.perf_counter()
    found = strategies.optimal(kind, steps, keep=False, **options)
    seconds = time.perf_counter() - begun
    return {"search": name, "error": found.error, "above_the_bound": found.above, "seconds": seconds}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    accounting.epsilon_interval(accounting.RandomAllocationGaussian(8, 1.5, 1), 1e-6)  # imports
    rows = [allocated(*each) for each in ALLOCATIONS] + [searched(name) for name in SEARCHES]
    for row in rows:
        print(row, flush=True)
    about = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "numpy": np.__version__,
        "scipy": scipy.__version__, "python": platform.python_version()}  # fmt: skip
    given.output.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
