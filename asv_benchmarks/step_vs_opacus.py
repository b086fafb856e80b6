"""Time noise and update of dpcore and Opacus's optimizer step, in turn, in one process and on one thread count.

Both start from the sum of the clipped per-example gradients and end with new parameters: noise, division by the batch
size, Adam, on float32 parameters. dpcore's noise is cryptographic (ChaCha20) and exact, Opacus's is torch.normal
(Mersenne twister). Seconds are the processor's, of all threads: other programs hardly blur them.

Opacus is not a dependency of dpcore. Install it next to the environment, without letting it touch torch:

    pip install --no-deps --target /tmp/opacus opacus opt_einsum
    PYTHONPATH=/tmp/opacus python asv_benchmarks/step_vs_opacus.py --output asv_benchmarks/recorded/step_vs_opacus.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

NOISE_MULTIPLIER, MAX_GRAD_NORM, BATCH_SIZE = 1.1, 1.0, 256
LEARNING_RATE, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-8


def dpcore_step(sizes: list[int]) -> Callable[[], None]:
    """Return one step of the CPU backend: `Backend.step` without a filter, a new row of noise each time."""
    import torch

    from dpcore.spec.backends import load_backend
    from dpcore.spec.grid import step_of
    from dpcore.spec.ops import NoiseRow, Slot, UpdateSettings

    ops = load_backend("torch")
    slots, first = [], 0
    for size in sizes:
        moments = (torch.zeros(size), torch.zeros(size))
        slots.append(Slot(torch.zeros(size), torch.ones(size, dtype=torch.float64), first, moments=moments))
        first += -(-size // 4096) * 4096
    settings = [UpdateSettings(LEARNING_RATE, beta1=BETA1, beta2=BETA2, eps=EPS)] * len(slots)
    key, state = os.urandom(32), {"row": 0}

    def step() -> None:
        noise = NoiseRow(key, row=state["row"], stream=0, scale=NOISE_MULTIPLIER * MAX_GRAD_NORM)
        state["row"] += 1
        ops.step(slots, noise, BATCH_SIZE, (), "adam", settings, state["row"], unit=step_of(noise.scale, noise.bits))

    return step


def opacus_step(sizes: list[int], fused: bool) -> Callable[[], None]:
    """Return what DPOptimizer.step does after clipping: add_noise, scale_grad, the original optimizer's step."""
    import torch
    from opacus.optimizers import DPOptimizer

    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    adam = torch.optim.Adam(parameters, lr=LEARNING_RATE, betas=(BETA1, BETA2), eps=EPS, fused=fused or None)
    optimizer = DPOptimizer(
        adam, noise_multiplier=NOISE_MULTIPLIER, max_grad_norm=MAX_GRAD_NORM, expected_batch_size=BATCH_SIZE
    )
    totals = [torch.ones(size) for size in sizes]
    for parameter in parameters:
        parameter.grad_sample = torch.empty(0)  # type: ignore[attr-defined]  # only counted: one micro-batch

    def step() -> None:
        for parameter, total in zip(parameters, totals, strict=True):
            # A new view each time: Opacus marks the tensor as processed and refuses to noise it twice.
            parameter.summed_grad = total.detach()  # type: ignore[attr-defined]
        optimizer.add_noise()
        optimizer.scale_grad()
        optimizer.original_optimizer.step()

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, Any]:
    """Time the steps in turn, `rounds` times each, so that a drift of the machine meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + 2):  # the first two warm up: state is allocated, pages are touched
        for name, step in steps.items():
            begin = time.process_time()
            step()
            if round_number >= 2:
                seconds[name].append(time.process_time() - begin)
    return {
        name: {"median_s": statistics.median(found), "min_s": min(found), "max_s": max(found)}
        for name, found in seconds.items()
    }


def machine() -> dict[str, Any]:
    """Describe where the figures were measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    packages = ("numpy", "torch", "opacus", "cryptography")
    return {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--tensors", type=int, default=10, help="parameters are split evenly over this many tensors")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(arguments.threads)
    found = {"machine": machine()}
    sizes = [arguments.parameters // arguments.tensors] * arguments.tensors
    steps = {
        "dpcore": dpcore_step(sizes),
        "opacus": opacus_step(sizes, fused=False),
        "opacus_fused_adam": opacus_step(sizes, fused=True),
        "torch_normal": lambda: [torch.normal(0.0, 1.0, (size,)) for size in sizes],
    }
    times = measure(steps, arguments.rounds)
    result = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "parameters": sum(sizes),
        "tensors": len(sizes),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        **found,
        "times": times,
        # Above 1: dpcore is faster.
        "opacus_over_dpcore": times["opacus"]["median_s"] / times["dpcore"]["median_s"],
        "opacus_fused_adam_over_dpcore": times["opacus_fused_adam"]["median_s"] / times["dpcore"]["median_s"],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
