"""Normalizations with trained weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpcore.errors import ArgumentError
from dpcore.torch.gradients.errors import Mixes
from tests.unit.torch.gradients.one_by_one import Readout, compare, randomized

KINDS = {
    "layer": nn.LayerNorm,
    "layer of two dimensions": lambda size: nn.LayerNorm((6, size)),
    "layer without bias": lambda size: nn.LayerNorm(size, bias=False),
    "root mean square": nn.RMSNorm,
    "group": lambda _: nn.GroupNorm(3, 6),
    "instance": lambda _: nn.InstanceNorm1d(6, affine=True),
    "batch, evaluated": lambda _: nn.BatchNorm1d(6).eval(),
}


@given(
    kind=st.sampled_from(sorted(KINDS)),
    size=st.sampled_from([3, 5]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    frozen=st.sampled_from([None, "weight", "bias"]),
)
def test_normalizations(kind, size, dtype, frozen):
    module = KINDS[kind](size)
    if getattr(module, frozen or "", None) is not None:
        getattr(module, frozen).requires_grad_(False)
    compare(randomized(Readout(module, nn.Linear(3, size)), dtype), (6, 3), dtype)


def test_images():
    compare(randomized(nn.GroupNorm(2, 4)), (4, 3, 3))
    compare(randomized(nn.InstanceNorm2d(4, affine=True)), (4, 3, 3))


@pytest.mark.parametrize("kept", [False, True])
def test_statistics_of_a_batch_are_refused(kept):
    words = "changes its buffer" if kept else "takes statistics over the examples of a batch"
    with pytest.raises(ArgumentError if kept else Mixes, match=words):
        compare(nn.BatchNorm1d(3, track_running_stats=kept).double(), (3,))
