"""The DP-SRG paper's figure 1 (section 5.1), and on MNIST other participations at the same privacy.

    python docs/studies/srg_mnist.py --data-dir DIR --out FOLDER [--data cifar-10] [--runs 30] [--processes 2]

Multiclass logistic regression, batches of 500 in a fixed order, momentum 0.9, delta 1e-6; MNIST: one epoch at epsilon
0.1; CIFAR-10: six at 2. DP-MEMF and DP-SRG-MEMF with the dense strategies that are optimal for prefix sums ("ones") and
for the method's own workload ("true"), under three conversions of the noise to epsilon. Learning rate and clip norm are
those of the best mean over two seeds that are not used again, under the exact conversion. Writes srg-mnist.json, or
srg-cifar-10.json.
"""

from __future__ import annotations

import argparse
import math
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from dpcore.strategies import workloads
from study import save

import dpcore
import dpcore.torch
from dpcore import accounting, strategies
from dpcore.accounting.gaussian import event_mu
from dpcore.cli.datasets import load
from dpcore.cli.intervals import mean_interval

DELTA, BATCH, MOMENTUM, DECAY = 1e-6, 500, 0.9, float(np.exp(-2.5))
CASES = [("memf", "ones"), ("memf", "true"), ("srg_memf", "ones"), ("srg_memf", "true")]


class Row(NamedTuple):
    """What the paper states of one data set: its sizes, epsilon, and the accuracies of `CASES` and without privacy."""

    examples: int
    pixels: int
    epochs: int
    epsilon: float
    paper: tuple[float, ...]
    non_private: float


ROWS = {
    "mnist": Row(60_000, 784, 1, 0.1, (82.555, 83.593, 82.456, 83.753), 91.530),
    "cifar-10": Row(50_000, 3072, 6, 2.0, (35.680, 35.272, 36.854, 36.816), 37.971),
}


class Classic(accounting.GaussianAccountant):
    """The conversion of zero-concentrated privacy (Bun, Steinke 2016, proposition 1.3), with rho = mu^2 / 2."""

    name = "classic"

    def epsilon(self, event: accounting.Event, delta: float) -> float:
        rho = event_mu(event) ** 2 / 2
        return rho + 2 * math.sqrt(rho * -math.log(delta))


CONVERSIONS: dict[str, Any] = {"classic": Classic(), "improved": "rdp", "exact": "gaussian"}
# Learning rate times clip norm, and clip norm.
MOVES, CLIPS = (0.04, 0.08, 0.16), (2.0, 4.0, 8.0)
TUNING_SEEDS = 2


@cache
def data(name: str, folder: str) -> tuple[Any, Any]:
    """Images and labels of both parts, as tensors."""
    found = load(name, folder)

    def tensors(inputs: Any, targets: Any) -> Any:
        return torch.tensor(inputs.reshape(len(inputs), -1)), torch.tensor(targets)

    return tensors(found.train_inputs, found.train_targets), tensors(found.test_inputs, found.test_targets)


@cache
def method_of(name: str, workload: str, steps: int, epochs: int) -> dict[str, Any]:
    """The method's own settings, with its strategy."""
    if name == "dp_sgd":
        return {}
    wanted = workloads.ones(steps)
    if workload == "true":
        wanted = workloads.momentum(steps, MOMENTUM) if name == "memf" else workloads.srg(steps, DECAY, MOMENTUM)
    found: dict[str, Any] = {"strategy": strategies.optimal("dense", wanted, epochs=epochs, tolerance=1e-4).strategy}
    return found if name == "memf" else {**found, "decay": DECAY}


def run(task: dict[str, Any]) -> float:
    """Train once and return the test accuracy in percent."""
    torch.set_num_threads(1)
    row, (train, test) = ROWS[task["data"]], data(task["data"], task["folder"])
    torch.manual_seed(task["seed"])
    model = torch.nn.Linear(row.pixels, 10)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    name, clip, epochs = task["method"], task["clip"], task["epochs"]
    steps = row.examples // BATCH * epochs
    common = {"lr": task["move"] / clip, "max_grad_norm": clip, "batch_size": BATCH, "momentum": MOMENTUM}
    make = getattr(dpcore.methods, name)
    method = make(base="momentum", **common, **method_of(name, task["workload"], steps, epochs))
    if task["accountant"] is None:
        optimizer = torch.optim.SGD(model.parameters(), task["move"], momentum=MOMENTUM)
        rng = np.random.default_rng(task["seed"])  # noqa: TID251
        for batch in np.concatenate([rng.permutation(row.examples) for _ in range(epochs)]).reshape(-1, BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(train[0][batch]), train[1][batch]).backward()
            optimizer.step()
    else:
        private = dpcore.torch.make_private(model, train, method, target_epsilon=row.epsilon, target_delta=DELTA,
            steps=steps, sampling=task["sampling"], accountant=task["accountant"])  # fmt: skip
        for batch in private.loader:
            private.step(batch)
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean()) * 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=ROWS, default="mnist")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    began, rows, row = time.perf_counter(), list[Any](), ROWS[given.data]
    for name, workload in CASES:  # once, and kept in the cache for the processes
        method_of(name, workload, row.examples // BATCH * row.epochs, row.epochs)
    with ProcessPoolExecutor(given.processes) as pool:

        def measured(label: str, paper: float | None = None, like: Any = None, **settings: Any) -> dict[str, Any]:
            base = {
                "data": given.data,
                "folder": given.data_dir,
                "epochs": row.epochs,
                "workload": "",
                "sampling": "fixed-order",
                **settings,
            }
            moves = MOVES if base["accountant"] else (0.03, 0.1, 0.3)
            clips = CLIPS if base["accountant"] else (1.0,)
            grid = [{**base, "move": move, "clip": clip} for move in moves for clip in clips]
            if like is None:
                tried = [{**one, "seed": 10_000 + seed} for one in grid for seed in range(TUNING_SEEDS)]
                scores = np.array(list(pool.map(run, tried))).reshape(len(grid), -1).mean(axis=1)
                best = grid[int(scores.argmax())]
            else:
                best = {**base, "move": like["move"], "clip": like["clip"]}
            found = list(pool.map(run, [{**best, "seed": seed} for seed in range(given.runs)]))
            estimate = mean_interval(found)
            found_row = {
                "label": label,
                "paper": paper,
                "mean": round(estimate.center, 3),
                "half_of_95_percent": round(estimate.half_width, 3),
                "runs": given.runs,
                "lr": best["move"] / best["clip"],
                "max_grad_norm": best["clip"],
            }
            rows.append(found_row)
            print(found_row, flush=True)
            return best

        passes = "one epoch" if row.epochs == 1 else f"{row.epochs} epochs"
        measured(f"non-private, {passes}", row.non_private, method="dp_sgd", accountant=None)
        tuned: dict[tuple[str, str], Any] = {}
        for conversion, accountant in reversed(CONVERSIONS.items()):
            for case, paper in zip(CASES, row.paper, strict=True):
                name, workload = case
                tuned[case] = measured(f"{name}, {workload}, {conversion}", paper, tuned.get(case), method=name,
                    workload=workload, accountant=accountant)  # fmt: skip
        # Other participations at the same (epsilon, delta).
        others = given.data == "mnist"
        for epochs in (2, 4) if others else ():
            measured(
                f"memf, true, {epochs} epochs, exact",
                method="memf",
                workload="true",
                accountant="gaussian",
                epochs=epochs,
            )
        for epochs in (1, 4) if others else ():
            measured(f"dp_sgd, random allocation, {epochs} epochs, certified", method="dp_sgd", accountant="pld",
                epochs=epochs, sampling="random-allocation")  # fmt: skip
        if others:
            measured("dp_sgd, Poisson sampling, 4 epochs, certified", method="dp_sgd", accountant="pld", epochs=4,
                sampling="poisson")  # fmt: skip
    save(given.out / f"srg-{given.data}.json", {"epsilon": row.epsilon, "delta": DELTA, "rows": rows}, began)


if __name__ == "__main__":
    main()
