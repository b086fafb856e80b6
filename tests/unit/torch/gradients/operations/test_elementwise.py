"""Sums, products, quotients, copies and parts of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpcore.stages.clipping.blocks import Linear
from tests.unit.torch.gradients.one_by_one import Readout, compare, randomized


class Applied(nn.Module):
    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function, self.parameter = function, nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.parameter)


def in_place(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    x = x * 1
    other = x
    x += p
    return x * other.add_(p)


OPERATIONS = {
    "x + p": lambda x, p: x + p,
    "p + x": lambda x, p: p + x,
    "x - p": lambda x, p: x - p,
    "p - x": lambda x, p: p - x,
    "torch.sub": torch.sub,
    "x * p": lambda x, p: x * p,
    "torch.mul": lambda x, p: torch.mul(p, x),
    "x / p": lambda x, p: x / (p + 3),
    "p / x": lambda x, p: p / (x * x + 1),
    "torch.div": lambda x, p: torch.div(p, x * x + 1),
    "alpha": lambda x, p: torch.add(x, p, alpha=2),
    "no rule": torch.atan2,
    "x += p": in_place,
    "part": lambda x, p: x * p.narrow(-1, 0, 1),
}


@given(
    name=st.sampled_from(sorted(OPERATIONS)),
    shape=st.sampled_from([(4,), (3, 4), (1, 3, 1), (1, 1, 1), (1, 3, 4)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_operations(name, shape, dtype):
    compare(randomized(Readout(Applied(OPERATIONS[name], *shape), nn.Linear(2, 4)), dtype), (3, 2), dtype)


COPIES = {
    "repeat": lambda x, p: torch.cat([p.repeat(len(x), 2, 3), x.repeat(1, 1, 3)], 1),
    "repeat of several rows": lambda x, p: p.squeeze(0).repeat(len(x), 1).unflatten(0, (len(x), 2)) + x[:, :2],
    "expand": lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], 1),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies(name):
    compare(randomized(Readout(Applied(COPIES[name], 1, 2, 4), nn.Linear(2, 4))), (3, 2))


PARTS = {
    "split": lambda p: p.split([2, 4])[1],
    "chunk": lambda p: p.chunk(3)[1],
    "slice": lambda p: p[1:4],
    "narrow": lambda p: p.narrow(0, 2, 3),
    "transposed": lambda p: p[1:5].t()[:, :2].t(),
    "columns": lambda p: p[:, 1:3].repeat(1, 2),
    "steps": lambda p: p[::2],
    "one row": lambda p: p[2][None],
    "parts of parts": lambda p: p[1:5][1:3],
    "from the end": lambda p: p[-4:-1],
    "turned parts of parts": lambda p: p.t()[:, -3:][:, 1:].t(),
    "one column": lambda p: p[:, 1:2].expand(-1, 4),
    "two in another order": lambda p: torch.cat(p.split([2, 4])[::-1]),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_of_a_weight(name, dtype):
    model = Applied(lambda x, p: F.linear(x, PARTS[name](p)) + F.linear(x, p)[..., :1], 6, 4)
    compare(randomized(model, dtype), (3, 4), dtype)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, p: F.linear(x, p[1:3]),
        lambda x, p: F.linear(x, p[1:5][1:3]),
        lambda x, p: F.linear(F.linear(x, p[:4]), p.split([2, 4])[1]),
        lambda x, p: F.linear(x, p.split([2, 4])[1]) + F.linear(x, p.split([2, 4])[0])[..., :1],
        lambda x, p: torch.einsum("btd,hd->bth", x, p[-3:]),
    ],
)
def test_a_part_is_a_pair(forward):
    (block,) = compare(randomized(Applied(forward, 6, 4)), (3, 4))
    assert isinstance(block, Linear)
    assert block.shape == (6, 4)


def test_parts_of_other_tensors():
    compare(randomized(Applied(lambda x, p: x * p[1:5] + p[:4], 6)), (3, 4))
    compare(randomized(Applied(lambda x, p: F.conv1d(x, p[1:4]), 6, 3, 2)), (3, 4))


def changed(p: torch.Tensor) -> torch.Tensor:
    p = p.clone()
    p[0] = 0
    return p


WRITTEN = {
    "derived": lambda x, p: x * p.clone().mul_(2),
    "part of derived": lambda x, p: x * changed(p),
    "examples": lambda x, p: (x * 1).mul_(p),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_writing(name):
    compare(randomized(Applied(WRITTEN[name], 4)), (3, 4))
