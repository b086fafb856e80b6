"""Kernels of the triton backend at sizes beyond every cache, timed by CUDA events: device work without its launch.

A hundred million coordinates never run on a CPU: everything here is skipped if there is no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .common import KEY, load, require

SIZE, TENSORS = 100_000_000, 10
EXAMPLES, WIDTH = 64, 10_000_000
FORMS = (
    "sgd, no noise", "sgd, chacha20", "momentum, chacha20", "adam, no noise", "adam, chacha20", "adam, philox",
    "adamw, chacha20", "sgd, banded 8", "sgd, banded 32", "adam, filter of order 1", "adam, filter of order 2",
    "sgd, filter of order 1, displacement (as DiSK)", "adam, scale",
)  # fmt: skip


def milliseconds(run: Any) -> float:
    """Return the lesser of two passes' medians; a pass empties the cache between its rounds."""
    from gpu.clock import times

    return float(min(times(run, timed=True)["ms"]))


class OnDevice:
    """What all share: the triton backend or nothing."""

    timeout = 600

    def setup(self, *_: Any) -> None:
        require("triton")
        sys.path.append(str(Path(__file__).parents[1]))  # asv puts only this package's name on its path
        self.ops = load("triton")


class DeviceStep(OnDevice):
    """The fused step in each form, 100 million parameters in ten tensors."""

    params = (FORMS,)
    param_names = ("form",)

    def setup(self, form: str) -> None:
        super().setup()
        from gpu.steps import CASES, Steps

        self.steps = Steps(CASES[form], [SIZE // TENSORS] * TENSORS, "cuda")

    def track_step(self, form: str) -> float:
        return milliseconds(self.steps.step)

    track_step.unit = "ms"  # type: ignore[attr-defined]


class DeviceNormal(OnDevice):
    """A hundred million standard normals."""

    params = (("chacha20", "philox"),)
    param_names = ("rng",)

    def track_normal(self, rng: str) -> float:
        return milliseconds(lambda: self.ops.normal(KEY, 0, 0, 0, SIZE, rng=rng))

    track_normal.unit = "ms"  # type: ignore[attr-defined]


class DeviceClip(OnDevice):
    """Norms and weighted sum of 64 vectors of ten million."""

    def setup(self) -> None:
        super().setup()
        import torch

        self.rows = [torch.randn(EXAMPLES, WIDTH, device="cuda")]
        self.weights = [1e9 * torch.rand(EXAMPLES, device="cuda", dtype=torch.float64)]
        self.out = [torch.zeros(WIDTH, dtype=torch.float64, device="cuda")]

    def track_row_norms(self) -> float:
        return milliseconds(lambda: self.ops.row_norms(self.rows))

    track_row_norms.unit = "ms"  # type: ignore[attr-defined]

    def track_weighted_sum(self) -> float:
        return milliseconds(lambda: self.ops.weighted_sum(self.rows, self.weights, self.out))

    track_weighted_sum.unit = "ms"  # type: ignore[attr-defined]
