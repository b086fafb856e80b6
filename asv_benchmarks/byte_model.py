"""A byte-level language model trained privately in float32 and in bf16, with the same weights, batches and noise.

    python asv_benchmarks/byte_model.py --output byte_model.json

The corpus is Python's standard library as it is installed; every tenth file is held out, and its loss is told. An
example is 65 bytes of a file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from whole_step.models import Transformer, loss
from whole_step.record import machine

import dpcore
import dpcore.torch

LENGTH = 64


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Return examples to train on and held-out ones, (n, LENGTH + 1) of bytes."""
    root, parts = Path(sysconfig.get_paths()["stdlib"]), ([], [])
    files = [path for path in sorted(root.rglob("*.py")) if not {"site-packages", "test", "tests"} & set(path.parts)]
    for place, path in enumerate(files):
        data = torch.tensor(list(path.read_bytes()), dtype=torch.uint8)
        if len(data) > LENGTH:
            parts[place % 10 == 0].append(data.unfold(0, LENGTH + 1, LENGTH + 1))
    return torch.cat(parts[0]).long(), torch.cat(parts[1])[::97][:512].long()


def main() -> None:
    """Train both in turn, and write what the held-out loss was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    train, held_out = corpus()
    runs: dict[str, Any] = {}
    for name, precision in (("float32", None), ("bf16", "bf16")):
        torch.manual_seed(0)
        model = Transformer(256, 192, 6, 4, LENGTH)
        method = dpcore.methods.dp_adam(lr=2e-3, batch_size=given.batch_size, max_grad_norm=1.0)
        runs[name] = dpcore.torch.make_private(
            model, (train[:, :-1], train[:, 1:]), method, steps=given.steps, loss=loss, precision=precision,
            target_epsilon=3, target_delta=1e-6, key=bytes(32), exact_key=True, microbatch_size=given.batch_size,
        )  # fmt: skip
    seconds, curve = dict.fromkeys(runs, 0.0), []
    loaders = {name: iter(run.loader) for name, run in runs.items()}
    for step in range(given.steps + 1):
        if step % given.every == 0 or step == given.steps:
            with torch.no_grad():
                losses = {name: loss(run.model(held_out[:, :-1]), held_out[:, 1:]) for name, run in runs.items()}
            told = {name: value.item() / math.log(2) for name, value in losses.items()}
            curve.append({"step": step, "bits_per_byte": told, "processor_s": dict(seconds)})
            print(curve[-1], flush=True)
        for name, run in runs.items() if step < given.steps else ():
            batch = next(loaders[name])
            begin = time.process_time()
            run.step(batch)
            seconds[name] += time.process_time() - begin
    run = runs["bf16"]
    found = {
        "command": " ".join(sys.argv), "machine": machine(), "examples": len(train), "held_out": len(held_out),
        "parameters": sum(p.numel() for p in run.model.parameters()), "epsilon": run.epsilon(), "delta": 1e-6,
        "noise_multiplier": run.plan.noise_multiplier, "autocast": run.explain().autocast, "curve": curve,
    }  # fmt: skip
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
