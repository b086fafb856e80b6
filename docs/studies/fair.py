"""CNN-5 on MNIST at equal epochs and at equal gradients: the study of docs/studies/fair.md.

    OMP_NUM_THREADS=1 python docs/studies/fair.py --data-dir DIR [--until 06:00]
    python docs/studies/fair.py --report

The first makes the runs of fair.toml that docs/results/fair.jsonl lacks, and adds a line when a run ends. Keys follow
from seeds, so that runs of a seed share batches and noise: nothing here is private.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from study import machine

import dpcore
import dpcore.torch
from dpcore.cli.datasets import load
from dpcore.stages.updates.schedules import WarmupCosine
from dpcore.torch.model import models

HERE = Path(__file__).parent
DESIGN: dict[str, Any] = tomllib.loads((HERE / "fair.toml").read_text())
ROWS, PAGE = HERE.parent / "results" / "fair.jsonl", HERE / "fair.md"
MARKS = ("<!-- from here: written by fair.py --report -->", "<!-- to here -->")
DELTA = float(Fraction(DESIGN["delta"]))


def planned() -> Iterator[tuple[int, dict[str, Any], str]]:
    """All runs in their order: seed, cell and the name of an arm."""
    for seed in range(DESIGN["seeds"]):
        for cell in DESIGN["cells"]:
            for arm in cell["arms"]:
                yield seed, cell, arm


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@cache
def calibrated(examples: int, batch_size: int, steps: int) -> float:
    sampler = dpcore.sampling.PoissonSampler(dataset_size=examples, batch_size=batch_size)
    plan = dpcore.Plan(dpcore.methods.dp_sgd(lr=1), sampler, steps)
    return plan.calibrated(DESIGN["epsilon"], DELTA).noise_multiplier


def train(data: Any, seed: int, cell: dict[str, Any], arm: str) -> dict[str, Any]:
    """Train once; return the row, with the test accuracy in percent after each epoch."""
    began, own = time.process_time(), dict(DESIGN["arms"][arm])
    make, lr = dpcore.methods.METHODS[own.pop("method")], cell["lr"] * own.pop("rate", 1)
    epochs, batch_size = cell["epochs"] * own.pop("times", 1), DESIGN["batch-size"]
    per_epoch = math.ceil(len(data) / batch_size)
    steps = epochs * per_epoch
    sigma = calibrated(len(data), batch_size, steps)
    if cell.get("schedule") == "cosine":
        own["schedule"] = WarmupCosine(0)
    method = make(lr=lr, batch_size=batch_size, noise_multiplier=sigma, max_grad_norm=DESIGN["max-grad-norm"],
                  clipping="standard", **own)  # fmt: skip
    torch.manual_seed(seed)
    model = models.build("cnn-5-torch" if cell.get("start") == "torch" else "cnn-5", data.shape, data.classes)
    private = dpcore.torch.make_private(
        model, (torch.tensor(data.train_inputs), torch.tensor(data.train_targets)), method, steps=steps,
        target_delta=DELTA, key=hashlib.sha256(f"dpcore fair study, seed {seed}".encode()).digest(), exact_key=True,
    )  # fmt: skip
    images, labels = torch.tensor(data.test_inputs), torch.tensor(data.test_targets)
    accuracy = []
    while private.steps_taken < steps:
        for batch in private.loader:
            private.step(batch)
            if private.steps_taken % per_epoch == 0:
                with torch.no_grad():
                    right = sum(
                        int((model(x).argmax(1) == y).sum())
                        for x, y in zip(images.split(1000), labels.split(1000), strict=True)
                    )
                accuracy.append(round(100 * right / len(labels), 4))
            if private.steps_taken == steps:
                break
    return {
        "cell": cell["name"], "arm": arm, "seed": seed, "lr": lr, "steps": steps, "noise_multiplier": sigma,
        "epsilon": private.plan.epsilon(DELTA), "accuracy": accuracy,
        "processor_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def study(data: Any, rows: Path, until: str) -> None:
    def add(row: dict[str, Any]) -> None:
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    made = {(row["seed"], row["cell"], row["arm"]) for row in read(rows) if "arm" in row}
    add({"session": " ".join(sys.argv), "machine": {**machine(), "torch": torch.__version__}, "began": time.ctime()})
    for seed, cell, arm in planned():
        if until and time.strftime("%H:%M") >= until:
            return
        if (seed, cell["name"], arm) not in made:
            add(train(data, seed, cell, arm))


def paired(
    rows: list[dict[str, Any]], one: tuple[str, str], other: tuple[str, str], epoch: int | None = None
) -> list[float]:
    """Differences of accuracy between two (cell, arm) after an epoch or the last one, for the seeds that have both."""
    final = {(row["cell"], row["arm"], row["seed"]): row["accuracy"][(epoch or 0) - 1] for row in rows
             if len(row["accuracy"]) >= (epoch or 0)}  # fmt: skip
    seeds = range(DESIGN["seeds"])
    return [final[*one, s] - final[*other, s] for s in seeds if (*one, s) in final and (*other, s) in final]


def estimate(values: list[float], comparisons: int = 1) -> str:
    """Mean and half width of Student's interval, of 95 % for all `comparisons` together."""
    if len(values) < 2:
        return f"{values[0]:+.2f} (one seed)" if values else "not run"
    half = stats.t.ppf(1 - 0.025 / comparisons, len(values) - 1) * stats.sem(values)
    return f"{np.mean(values):+.2f} ± {half:.2f}"


def report(rows: list[dict[str, Any]]) -> str:
    runs = [row for row in rows if "arm" in row]
    total = len(list(planned()))
    lines = [f"{len(runs)} of {total} runs. Test accuracy in percent after the last step; differences in points.", ""]
    lines += [
        "| cell | arm | epochs | seeds | accuracy | less DP-SGD | less DP-SGD, twice the epochs |",
        "| --- " * 7 + "|",
    ]
    for cell in DESIGN["cells"]:
        for arm in cell["arms"]:
            ends = [row["accuracy"][-1] for row in runs if (row["cell"], row["arm"]) == (cell["name"], arm)]
            if not ends:
                continue
            others = [name for name in ("DP-SGD", "DP-SGD, twice the epochs") if name in cell["arms"]]
            less = ["-" if arm == name else estimate(paired(runs, (cell["name"], arm), (cell["name"], name)))
                    for name in others]  # fmt: skip
            epochs = cell["epochs"] * DESIGN["arms"][arm].get("times", 1)
            cells = [
                cell["name"],
                arm,
                epochs,
                len(ends),
                estimate(ends).replace("+", ""),
                *less,
                *["-"] * (2 - len(less)),
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, "", *primary(runs), "", *secondary(runs)])


def primary(runs: list[dict[str, Any]]) -> list[str]:
    arms = ("DP-SGD", "low-pass", "DP-PMLF", "DP-SGD, twice the epochs")
    sgd, low, pmlf, twice = (("as printed", arm) for arm in arms)
    short = "short, rate 0.5"
    asked = (
        ("(2) low-pass less DP-SGD", paired(runs, low, sgd), 3),
        ("(3) DP-PMLF less DP-SGD, equal epochs", paired(runs, pmlf, sgd), 3),
        ("(4) DP-PMLF less DP-SGD, equal gradients", paired(runs, pmlf, twice), 3),
        ("(5) DP-SGD, rate 5 less rate 0.5", paired(runs, ("short, rate 5", "DP-SGD"), (short, "DP-SGD")), 1),
        ("(5) DP-PMLF less DP-SGD at rate 0.5", paired(runs, (short, "DP-PMLF"), (short, "DP-SGD")), 1),
    )
    lines = ["| hypothesis | 95 % | all three together |", "| --- | --- | --- |"]
    for words, values, many in asked:
        lines.append(f"| {words} | {estimate(values)} | {estimate(values, many) if many > 1 else '-'} |")
    return lines


def secondary(runs: list[dict[str, Any]]) -> list[str]:
    sgd, low, pmlf = (("as printed", arm) for arm in ("DP-SGD", "low-pass", "DP-PMLF"))
    fast, slow = (("short, rate 5", "DP-SGD"), ("short, rate 0.5", "DP-SGD"))
    lines = [
        "| after epoch | DP-SGD as printed | low-pass less DP-SGD | DP-PMLF less DP-SGD | rate 5 less rate 0.5 |",
        "| --- " * 5 + "|",
    ]
    for epoch in (1, 5, 10, 25):
        own = [row["accuracy"][epoch - 1] for row in runs if (row["cell"], row["arm"]) == sgd]
        pairs = (low, sgd), (pmlf, sgd), (fast, slow)
        less = [estimate(values) if (values := paired(runs, *pair, epoch)) else "-" for pair in pairs]
        lines.append("| " + " | ".join([str(epoch), estimate(own).replace("+", ""), *less]) + " |")
    return lines


def write_page(page: Path, rows: list[dict[str, Any]]) -> None:
    text = page.read_text()
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    page.write_text(f"{before}{MARKS[0]}\n\n{report(rows)}\n\n{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--until", default="", help="HH:MM: no run begins after it")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    if given.report:
        write_page(PAGE, read(given.rows))
        return
    torch.set_num_threads(1)
    study(load("mnist", given.data_dir), given.rows, given.until)


if __name__ == "__main__":
    main()
