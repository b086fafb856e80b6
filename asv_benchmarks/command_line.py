"""Time the command line: the first line of a run, a comparison in one and in two processes, small models on threads.

    python asv_benchmarks/command_line.py --output asv_benchmarks/recorded/command_line.json

Each contestant takes its turn in every round; times are medians. A model's step is a whole private one, noise and
update included, in this process; its products are parameters times examples, which is what `dpcore train` goes by
where it chooses one thread for "logistic" and "mlp". They are timed on the quiet machine, and once more with a process
on each core that computes without end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from whole_step.record import machine

from dpcore.methods import dp_sgd
from dpcore.torch import make_private

DPCORE = [sys.executable, "-m", "dpcore"]
TRAIN = ["train", "--data", "digits", "--epsilon", "3", "--epochs", "2"]
# Two learning rates and three final runs of each of three contestants: 15 runs.
COMPARE = ["compare", "--data", "digits", "--methods", "dp_sgd,disk,doppler", "--epsilon", "3", "--epochs", "5",
    "--lr", "0.5,1", "--seeds", "3"]  # fmt: skip
# Features, hidden units (none: logistic) and examples of a batch.
MODELS = ((64, 0, 64), (784, 0, 64), (784, 128, 32), (784, 128, 64), (784, 128, 128), (784, 128, 256), (784, 128, 512),
    (784, 512, 128), (784, 512, 256), (784, 512, 512))  # fmt: skip
STEPS, CLASSES = 30, 10


def first_line() -> dict[str, float]:
    """Return the seconds until `dpcore train` says something, and until it ends."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [*DPCORE, *TRAIN, "--out", f"{folder}/run"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        )
        assert process.stdout is not None
        process.stdout.read(1)
        said = time.perf_counter() - begun
        process.stdout.read()
        if process.wait():
            raise SystemExit(f"dpcore {' '.join(TRAIN)} failed")
        return {"first_line_s": said, "whole_s": time.perf_counter() - begun}


def compared(jobs: int) -> float:
    """Return the seconds of a comparison."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        command = [*DPCORE, *COMPARE, "--jobs", str(jobs), "--out", f"{folder}/comparison"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return time.perf_counter() - begun


def steps_of(features: int, hidden: int, batch_size: int) -> tuple[Callable[[], float], int]:
    """Return what times `STEPS` private steps of a model, and the products of one."""
    generator = torch.Generator().manual_seed(1)
    n = STEPS * batch_size
    inputs = torch.randn(n, features, generator=generator)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    layers = [nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)] if hidden else []
    model = nn.Sequential(*layers) if layers else nn.Linear(features, CLASSES)
    method = dp_sgd(batch_size=batch_size, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
    private = make_private(model, TensorDataset(inputs, labels), method, target_delta=1e-5, steps=100 * STEPS)

    def run() -> float:
        begun = time.perf_counter()
        for batch in private.loader:  # an epoch
            private.step(batch)
        return time.perf_counter() - begun

    return run, sum(p.numel() for p in model.parameters()) * batch_size


def threads(rounds: int) -> list[dict[str, Any]]:
    """Return the milliseconds of a step of each model with one thread and with two, in turn."""
    found = []
    for shape in MODELS:
        run, products = steps_of(*shape)
        run()
        times: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(rounds):
            for count, kept in times.items():
                torch.set_num_threads(count)
                kept.append(run() * 1000 / STEPS)
        one, two = median(times[1]), median(times[2])
        features, hidden, batch_size = shape
        found.append(
            {"features": features, "hidden": hidden, "batch_size": batch_size, "products": products,
             "one_thread_ms": one, "two_threads_ms": two, "two_over_one": two / one}
        )  # fmt: skip
        print(found[-1], flush=True)
    return found


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy for the length of the block."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)
    about = machine()
    lines = [first_line() for _ in range(given.rounds)]
    print(lines, flush=True)
    jobs: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(given.rounds):
        for count, kept in jobs.items():
            kept.append(compared(count))
    print(jobs, flush=True)
    quiet = threads(given.rounds)
    with busy_cores():
        busy = threads(given.rounds)
    result = {
        "command": " ".join(["python", *sys.argv]), "machine": about, "train": " ".join(TRAIN),
        "first_line": lines, "compare": " ".join(COMPARE), "jobs_s": jobs, "threads": quiet,
        "threads_while_cores_are_busy": busy,
    }  # fmt: skip
    given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
