"""Time dpcore's and jax-privacy's search for strategies, for the same problems, in one process and one run.

    python -m venv /tmp/jax && /tmp/jax/bin/pip install jax jax-privacy scipy
    PYTHONPATH=.:backends /tmp/jax/bin/python asv_benchmarks/strategies_vs_peers.py \
        --output asv_benchmarks/recorded/strategies_vs_peers.json

Prefix sums, mean squared error at mu = 1. Every strategy is a matrix whose error dpcore computes by its definition, on
one epoch or several. jax-privacy runs with float64 as its documentation says; its first run compiles, so the faster
one of two is given if the first took less than 20 seconds. dpcore's time includes its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax_privacy.matrix_factorization import buffered_toeplitz, dense, toeplitz

from dpcore import strategies

Solved = tuple[Any, dict[str, Any]]


def ours(kind: str, steps: int, **options: Any) -> Solved:
    """Solve by dpcore."""
    found = strategies.optimal(kind, steps, keep=False, **options)
    return found.strategy, {"lower_bound": None if found.lower_bound is None else found.lower_bound**2}


def theirs_dense(steps: int, epochs: int = 1) -> Solved:
    """Solve by jax-privacy."""
    return strategies.from_matrix(np.tril(np.asarray(dense.optimize(steps, epochs=epochs), np.float64))), {}


def theirs_banded_toeplitz(steps: int, bands: int) -> Solved:
    """Solve by jax-privacy."""
    series = np.asarray(toeplitz.optimize_banded_toeplitz(steps, bands), np.float64)
    return strategies.BandedToeplitz(tuple(series.tolist())), {}


def theirs_blt(steps: int, buffers: int) -> Solved:
    """Solve by jax-privacy."""
    found = buffered_toeplitz.optimize(
        n=steps, min_sep=steps, max_participations=1, error="mean", min_buffers=buffers, max_buffers=buffers
    )
    scales, decays = np.asarray(found.output_scale, np.float64), np.asarray(found.buf_decay, np.float64)
    return strategies.BLT(scales.tolist(), decays.tolist(), steps), {}


PROBLEMS: dict[str, tuple[int, int, Callable[[], Solved], Callable[[], Solved]]] = {
    "banded Toeplitz, 32 bands": (1024, 1, lambda: ours("banded-toeplitz", 1024, bands=32),
        lambda: theirs_banded_toeplitz(1024, 32)),
    "BLT, 3 buffers": (1024, 1, lambda: ours("blt", 1024, buffers=3), lambda: theirs_blt(1024, 3)),
    "dense, six epochs": (258, 6, lambda: ours("dense", 258, epochs=6), lambda: theirs_dense(258, 6)),
    "dense": (1024, 1, lambda: ours("dense", 1024), lambda: theirs_dense(1024)),
}  # fmt: skip


def timed(solve: Callable[[], Solved], steps: int, epochs: int) -> dict[str, Any]:
    """Return seconds, the squared error, and what else is known."""
    seconds = []
    while True:
        begun = time.perf_counter()
        strategy, more = solve()
        seconds.append(time.perf_counter() - begun)
        if len(seconds) == 2 or seconds[0] > 20:
            break
    error = strategies.error_of(strategy, strategies.workloads.ones(steps), epochs)
    return {"seconds": min(seconds), "first": seconds[0], "squared_error": error**2, **more}


def main() -> None:
    """Solve each problem by both, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    ours("dense", 16)  # imports happen once
    found: dict[str, Any] = {}
    for name, (steps, epochs, mine, peers) in PROBLEMS.items():
        found[name] = {"steps": steps, "epochs": epochs}
        for contestant, solve in (("dpcore", mine), ("jax-privacy", peers)):
            found[name][contestant] = timed(solve, steps, epochs)
            print(name, contestant, found[name][contestant], flush=True)
    versions = {package: version(package) for package in ("jax", "jax-privacy", "numpy", "scipy")}
    result = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "versions": versions,
        "threads": os.environ.get("OMP_NUM_THREADS"), "problems": found}  # fmt: skip
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
