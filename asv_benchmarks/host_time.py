"""Host time of a private step outside of the model: `Mechanism.add` twice and `release`, with the kernels taken out.

    python asv_benchmarks/host_time.py --output host_time.json

Triton backend, Adam, tensors on the CPU, every launch of dpcore_triton replaced by nothing. So it is what Python does
between launches; what Triton and CUDA take for a launch is not in it. Processor time, since the machine is shared: best
and median of many steps. Rows lie at the same addresses in each step, or, "new", in no two steps.

Then the same of a whole ``private.step`` of 75 linear layers: as ever, with graphs, and with the model's passes in
them, which are replaced by nothing as well. Where the model runs, its products of 16 x 16 numbers are in the time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from whole_step.record import machine

import dpcore
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.spec.backends import load_backend
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.torch import make_private
from dpcore_triton.launch import Launch

TENSORS, EXAMPLES, WIDTH, KEY = 150, 8, 1000, bytes(range(32))


def nothing(call: Launch) -> None:
    """Start nothing."""


def placed(fresh: bool) -> Iterator[list[torch.Tensor]]:
    """Yield rows without end; if `fresh`, each time 16 bytes further on."""
    size = EXAMPLES * WIDTH
    memory = torch.zeros(TENSORS * size + (1 << 20))
    for step in count():
        start = 4 * step if fresh else 0
        yield list(memory[start : start + TENSORS * size].view(TENSORS, EXAMPLES, WIDTH).unbind())


def case(graphs: bool, fresh: bool, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a step."""
    backend: Any = load_backend("triton")
    if graphs:
        backend = backend.with_graphs()
    method = dpcore.methods.dp_sgd(lr=1e-3, base="adam", noise_multiplier=1.0, batch_size=EXAMPLES, max_grad_norm=1.0)
    sampler = dpcore.sampling.FixedOrderSampler(dataset_size=EXAMPLES, batch_size=EXAMPLES)
    plan = Plan(method, sampler, 10_000, tensors=tuple(map(str, range(TENSORS))))
    layout = Layout.of((str(index), (WIDTH,)) for index in range(TENSORS))
    parameters = [torch.randn(WIDTH) for _ in range(TENSORS)]
    mechanism = Mechanism(plan, layout, parameters, backend=backend, keys=RunKeys.new(KEY))
    sources = [placed(fresh), placed(fresh)]
    steps, parts = [], []
    for _ in range(rounds + 5):
        first, second = map(next, sources)
        begun = time.process_time_ns()
        mechanism.add(first)
        mechanism.add(second)
        summed = time.process_time_ns()
        mechanism.release(parameters)
        ended = time.process_time_ns()
        steps.append((ended - begun) / 1e6)
        parts.append((summed - begun) / 1e6)
    return {
        "graphs": graphs, "rows": "new" if fresh else "same", "step_ms": min(steps[5:]), "median_ms": median(steps[5:]),
        "two_adds_ms": min(parts[5:]),
    }  # fmt: skip


def whole_step(graphs: bool | str, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a whole private step of a model."""
    layers = [layer for _ in range(TENSORS // 2) for layer in (torch.nn.Linear(16, 16), torch.nn.ReLU())]
    data = torch.randn(64, 16), torch.randint(0, 16, (64,))
    method = dpcore.methods.dp_sgd(lr=1e-3, base="adam", noise_multiplier=1.0, batch_size=32, max_grad_norm=1.0)
    sampler = dpcore.sampling.FixedOrderSampler(dataset_size=64, batch_size=32)
    with dpcore.use_backend("triton"):
        run = make_private(
            torch.nn.Sequential(*layers), data, method, steps=10_000, sampling=sampler, microbatch_size=16,
            cuda_graphs=graphs, key=KEY,
        )  # fmt: skip
    steps = []
    while len(steps) < rounds + 12:
        for batch in run.loader:
            begun = time.process_time_ns()
            run.step(batch)
            steps.append((time.process_time_ns() - begun) / 1e6)
            if graphs == "model" and len(steps) == 10:
                _empty(run)
    return {"graphs": graphs, "step": "whole", "step_ms": min(steps[12:]), "median_ms": median(steps[12:])}


def _empty(run: Any) -> None:
    """Let replays of the model's passes do nothing."""
    repeated = run._engine.gradient.repeated
    assert repeated.refused is None
    replayed = [one for one in repeated.passes.kept.values() if one.captured]
    assert replayed
    for one in replayed:
        one._repeat = nothing_at_all


def nothing_at_all() -> None:
    """Replay nothing."""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    about, found = machine(), []
    with mock.patch.object(Launch, "start", nothing):
        for graphs in (False, True):
            for fresh in (False, True):
                found.append(case(graphs, fresh, given.rounds))
                print(found[-1], flush=True)
        for kind in (False, True, "model"):
            found.append(whole_step(kind, given.rounds // 3))
            print(found[-1], flush=True)
    result = {
        "command": " ".join(["python", *sys.argv]), "machine": about, "tensors": TENSORS, "examples": EXAMPLES,
        "width": WIDTH, "rounds": given.rounds, "kernels": "none: every launch is replaced by nothing", "cases": found,
    }  # fmt: skip
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
