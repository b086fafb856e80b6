"""A private step of a language model's head with its logits and without them: time and peak memory.

    python asv_benchmarks/head_without_logits.py --output head_without_logits.json

An embedding, a layer and a head tied to the embedding, on tokens drawn at random; one thread. Both runs take their
steps in turn, in one process. Processor time, since the machine is shared: median and best of the rounds. "sum" is the
clipped sum alone, "step" has noise and update too. Peak memory is that of the sum's tensors, beside parameters and the
run's own vectors.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from whole_step.record import machine

import dpcore
from dpcore.torch import PrivateRun, make_private
from dpcore.torch.memory import Peak

CLASSES = 50_257


class Language(nn.Module):
    """An embedding, a layer with a residual, and a head tied to the embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(CLASSES, width), nn.Linear(width, width), nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.out = nn.Linear(width, CLASSES, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, T, V)."""
        hidden = self.embed(tokens)
        logits: torch.Tensor = self.out(self.norm(hidden + torch.tanh(self.mix(hidden))))
        return logits


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def run_of(width: int, batch: tuple[torch.Tensor, ...], lean: bool) -> PrivateRun:
    """Return a run whose micro-batch is the whole batch, with or without logits."""
    torch.manual_seed(0)
    size = len(batch[0])
    method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=size)
    run = make_private(
        Language(width), batch, method, loss=loss, steps=1000, sampling="fixed-order", microbatch_size=size
    )
    run._engine.gradient.proved.lean = lean
    run._engine.gradient.proved.forget()
    return run


def case(width: int, times: int, examples: int, rounds: int) -> dict[str, Any]:
    """Return the figures of both ways."""
    batch = tuple(torch.randint(CLASSES, (2, examples, times)))
    runs = {name: run_of(width, batch, name == "without") for name in ("with", "without")}
    seconds: dict[str, dict[str, list[float]]] = {name: {"sum": [], "step": []} for name in runs}
    peaks: dict[str, int] = {}
    for place in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            drawn = next(iter(run.loader))
            run._engine.accumulate(drawn)
            middle = time.process_time()
            run._engine.mechanism.discard()
            run.step(drawn)
            if place:  # the first captures
                seconds[name]["sum"].append(middle - start)
                seconds[name]["step"].append(time.process_time() - middle)
    for name, run in runs.items():
        with Peak() as peak:
            run._engine.accumulate(next(iter(run.loader)))
        peaks[name] = peak.peak
    found: dict[str, dict[str, Any]] = {name: {"peak_bytes": peak} for name, peak in peaks.items()}
    for name, own in seconds.items():
        found[name] |= {what: {"median": median(s), "best": min(s), "all": s} for what, s in own.items()}
    return {"classes": CLASSES, "width": width, "positions": times, "examples": examples, "logits": found}


def main() -> None:
    """Measure, print, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for width, times, examples in ((256, 128, 4), (256, 128, 8), (768, 128, 4)):
        cases.append(case(width, times, examples, options.rounds))
        for name, own in cases[-1]["logits"].items():
            print(
                f"p = {width}, T = {times}, B = {examples}, {name} logits: sum {own['sum']['median']:.3f} s, step "
                f"{own['step']['median']:.3f} s, peak {own['peak_bytes'] / 2**20:.1f} MiB",
                flush=True,
            )
    if options.output:
        options.output.write_text(json.dumps({"machine": machine(), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
