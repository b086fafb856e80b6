"""Softmax regression on scattering coefficients of MNIST, by six methods: the study of docs/studies/scattering.md.

    pip install --no-deps kymatio==0.3.0
    python docs/studies/scattering.py --data-dir DIR --out FOLDER [--seeds 10] [--until 12:00]

Every run's row is written to FOLDER/scattering.jsonl when the run ends, and a row that is there is not run again, so
that an interrupted study goes on where it was. Keys follow from seeds: nothing here is private.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scattering_search import CONTESTANTS, Contestant, search
from scattering_spectrum import Watch
from study import machine

import dpcore
import dpcore.torch
from dpcore.cli.datasets import load

EPSILON, DELTA = 1.0, 1e-5
# 1,000 and 2,000 are no seeds of final runs.
TUNING_SEED, SPECTRUM_SEED = 1_000, 2_000
Part = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """The study's size; the defaults are those of the preregistration as amended."""

    epochs: float = 25
    batch_size: int = 512
    configurations: int = 7
    seeds: int = 10
    held_out: int = 10_000
    looks: int = 10
    subset: int = 6_000


class Rows:
    """The runs that have ended, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read(path) if path.exists() else []

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return row

    def find(self, **wanted: Any) -> dict[str, Any] | None:
        return next((row for row in self.rows if all(row.get(k) == v for k, v in wanted.items())), None)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scattering(images: torch.Tensor) -> torch.Tensor:
    """(n, 729) of norm 1: 81 scattering channels of 7 by 7, averaged to 3 by 3, normalized by groups of channels.

    All of it is done example by example, so that it costs no privacy.
    """
    # `kymatio.torch` also imports the three-dimensional transform, which calls functions that SciPy 1.17 has no longer.
    from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D

    transform = ScatteringTorch2D(J=2, shape=(28, 28))
    parts = []
    for part in images.split(500):
        pooled = F.adaptive_avg_pool2d(transform(part), 3)
        parts.append(F.normalize(F.group_norm(pooled, 27).flatten(1)))
    return torch.cat(parts)


def features(name: str, folder: str | None, cache_file: Path) -> tuple[Part, Part]:
    """Features and labels for training and test; of the built-in digits, for a try, pixels of norm 1."""
    found = load(name, folder)
    labels = [torch.tensor(targets) for targets in (found.train_targets, found.test_targets)]
    if name == "mnist" and cache_file.exists():
        inputs = list(torch.load(cache_file))
    else:
        images = [torch.tensor(part) for part in (found.train_inputs, found.test_inputs)]
        make = scattering if name == "mnist" else lambda part: F.normalize(part.flatten(1))
        inputs = [make(part.squeeze(1)) for part in images]
        if name == "mnist":
            torch.save(inputs, cache_file)
    return (inputs[0], labels[0]), (inputs[1], labels[1])


@cache
def calibrated(examples: int, batch_size: int, steps: int) -> tuple[float, float]:
    """The noise multiplier for (EPSILON, DELTA) under Poisson sampling, and the epsilon that it costs."""
    sampler = dpcore.sampling.PoissonSampler(dataset_size=examples, batch_size=batch_size)
    plan = dpcore.Plan(dpcore.methods.dp_sgd(lr=1), sampler, steps).calibrated(EPSILON, DELTA)
    return plan.noise_multiplier, plan.epsilon(DELTA)


def train(
    data: tuple[Part, Part],
    contestant: Contestant,
    setting: int,
    lr: float,
    seed: int,
    given: Settings,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Train once, and return the row: what was run, and the accuracy in percent on the second part on the way."""
    began = time.perf_counter()
    train_part, test = data
    examples, gradients = len(train_part[0]), contestant.gradients(setting)
    steps = math.ceil(given.epochs * examples / (given.batch_size * gradients))
    sigma, epsilon = calibrated(examples, given.batch_size, steps)
    model = torch.nn.Linear(train_part[0].shape[1], 10, bias=False)
    torch.nn.init.zeros_(model.weight)
    method = contestant.make(setting, lr, noise_multiplier=sigma, batch_size=given.batch_size)
    key = hashlib.sha256(f"dpcore scattering study, seed {seed}".encode()).digest()
    private = dpcore.torch.make_private(
        model, train_part, method, steps=steps, target_delta=DELTA, key=key, exact_key=True
    )
    looks = [round(steps * (look + 1) / given.looks) for look in range(given.looks)]
    accuracy = []
    while private.steps_taken < steps:
        for batch in private.loader:
            if watch is not None:
                watch.see(model.weight.detach(), batch)
            private.step(batch)
            if private.steps_taken in looks:
                with torch.no_grad():
                    accuracy.append(round(float((model(test[0]).argmax(1) == test[1]).float().mean()) * 100, 4))
    return {
        "method": method.name, "settings": contestant.settings[setting], "lr": lr, "seed": seed, "examples": examples,
        "gradients_an_example": gradients, "steps": steps, "noise_multiplier": sigma, "epsilon": epsilon,
        "noise_std": private.plan.noise_standard_deviation() / given.batch_size, "accuracy": accuracy,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def tuned(name: str, data: tuple[Part, Part], rows: Rows, given: Settings) -> tuple[int, float]:
    """The setting and learning rate that did best on the held-out end of the training part."""
    contestant, (inputs, labels) = CONTESTANTS[name], data[0]
    cut = len(inputs) - given.held_out
    parts = (inputs[:cut], labels[:cut]), (inputs[cut:], labels[cut:])

    def evaluate(setting: int, k: float) -> float:
        row = rows.find(kind="tuning", name=name, setting=setting, k=k)
        if row is None:
            row = train(parts, contestant, setting, contestant.rate * 2**k, TUNING_SEED, given)
            row = rows.add({"kind": "tuning", "name": name, "setting": setting, "k": k, **row})
            print(name, contestant.settings[setting], row["lr"], row["accuracy"][-1], row["seconds"], flush=True)
        return float(row["accuracy"][-1])

    setting, k = search(evaluate, len(contestant.settings), given.configurations)
    return setting, contestant.rate * 2**k


def study(data: tuple[Part, Part], rows: Rows, given: Settings, until: str = "") -> None:
    """All runs that `rows` lacks: the search, the spectra, and the final runs seed by seed."""
    rows.add({"kind": "session", "command": " ".join(sys.argv), "settings": vars(given), "began": time.ctime(),
              "machine": {**machine(), "torch": torch.__version__}})  # fmt: skip
    found = {name: tuned(name, data, rows, given) for name in CONTESTANTS}
    order = [("final", seed) for seed in range(given.seeds)]
    order.insert(min(3, len(order)), ("spectrum", SPECTRUM_SEED))
    for kind, seed in order:
        if until and time.strftime("%H:%M") >= until:
            break
        for name, (setting, lr) in found.items():
            if rows.find(kind=kind, name=name, seed=seed) is None:
                watch = Watch(data[0], given.subset, given.batch_size) if kind == "spectrum" else None
                row = train(data, CONTESTANTS[name], setting, lr, seed, given, watch)
                spectra = {} if watch is None else watch.spectra()
                rows.add({"kind": kind, "name": name, "setting": setting, **row, **spectra})
                print(kind, name, seed, lr, row["accuracy"][-1], row["seconds"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="mnist", choices=("mnist", "digits"))
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=Settings.seeds)
    parser.add_argument("--until", default="", help="HH:MM: no round of seeds begins after it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    data = features(given.data, given.data_dir, given.out / "features.pt")
    study(data, Rows(given.out / "scattering.jsonl"), Settings(seeds=given.seeds), given.until)


if __name__ == "__main__":
    main()
