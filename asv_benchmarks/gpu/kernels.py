"""The chunk of kernels: copy rate first, then everything that is compared with it."""

from __future__ import annotations

from functools import partial
from typing import Any

from . import host, operations
from .runner import Part, Setting
from .steps import CASES, Case, Steps

# Torch's fused optimizers are for CPU, too; one rule of each kind shows that the code runs.
SMALL = ("sgd, chacha20", "adam, no noise", "sgd, banded 8", "adam, filter of order 2", "adam, scale",
         "sgd, filter of order 1, displacement (as DiSK)")  # fmt: skip


def step(setting: Setting, case: Case) -> dict[str, Any]:
    """Check a form of the step at full size, then time it."""
    steps = Steps(case, operations.sizes(setting), setting.device)
    checked = steps.check()
    moved = steps.bytes_moved()
    traffic = "sum float64 read; float32 parameter and state read and written; see bytes_moved in steps.py"
    count = steps.coordinates()
    return operations.measured(steps.step, setting, moved, traffic, coordinates=count, check=checked)


def parts(setting: Setting) -> list[Part]:
    """Return the parts, those first without which the others say little."""
    found = [Part(f"copy {size} GB", partial(operations.copy, gigabytes=size)) for size in (1, 2, 4)]
    found += [Part(f"torch {name}, fused", partial(operations.torch_optimizer, name=name))
              for name in ("adam", "adamw", "sgd")]  # fmt: skip
    chosen = {name: case for name, case in CASES.items() if not setting.small or name in SMALL}
    found += [Part(f"step: {name}", partial(step, case=case)) for name, case in chosen.items()]
    return [
        *found,
        Part("peer: noise, division, Adam", operations.peer_step),
        Part("normal, chacha20", partial(operations.normals, rng="chacha20")),
        Part("normal, philox", partial(operations.normals, rng="philox")),
        Part("row_norms", operations.row_norms),
        Part("weighted_sum", operations.weighted_sum),
        Part("linear_norms, one position", operations.norms_of_one),
        Part("linear_sums, one position", operations.sliced_sums),
        Part("clip_factors", operations.clip_factors),
        Part("host: Backend.step", host.step_alone),
        Part("host: clip, sum, step", host.clip_and_release),
    ]
