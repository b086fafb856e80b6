"""Rows that are chosen or ordered by values among those of all examples: no shape tells whose they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpcore.torch.gradients.per_example import PerExampleGradient
from dpcore.torch.gradients.trial import try_out
from dpcore.torch.sources.places import UnknownLayout
from tests.unit.torch.sources.traced_models import Layers, alone, cross_entropy, rows, traced

EXAMPLE = torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64)
FAR = 50  # no made-up entry is beyond


def experts(s: Any, x: torch.Tensor, order: Any) -> torch.Tensor:
    """Each row is taken by `a` or `c`, and all made-up ones by `a`: their order is then the examples'."""
    order, count = order(x[:, 0] > FAR)
    sorted_rows = x[order]
    mixed = torch.cat([s.a(sorted_rows[:count]), s.c(sorted_rows[count:])])
    return s.b(torch.tanh(torch.zeros_like(mixed).index_copy(0, order, mixed)))


def by_sort(far: torch.Tensor) -> Any:
    return far.long().sort(stable=True)[1], int((~far).sum())


def by_top(far: torch.Tensor) -> Any:
    return torch.topk(-far.long(), len(far))[1], int((~far).sum())


def by_places(far: torch.Tensor) -> Any:
    return torch.cat([*torch.where(~far), far.nonzero()[:, 0]]), int((~far).sum())


def by_numbers(far: torch.Tensor) -> Any:
    return torch.tensor(sorted(range(len(far)), key=far.tolist().__getitem__)), int((~far).sum())


def by_count(far: torch.Tensor) -> Any:
    slots = torch.where(far, (~far).sum() + far.long().cumsum(0), (~far).long().cumsum(0)) - 1
    return torch.zeros_like(slots).index_copy(0, slots, torch.arange(len(far))), int((~far).sum())


def by_mask(far: torch.Tensor) -> Any:
    places = torch.arange(len(far))
    return torch.cat([places[~far], places[far]]), int((~far).sum())


def packed(s: Any, x: torch.Tensor) -> torch.Tensor:
    keep = ~(x[:, 0] > FAR)
    return s.b(torch.tanh(torch.zeros(len(x), 6).masked_scatter(keep[:, None], s.a(x))))


def written(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(len(x), 6)
    h[~(x[:, 0] > FAR)] = s.a(x)
    return s.b(torch.tanh(h))


FORWARDS = [
    lambda s, x: experts(s, x, by_sort),
    lambda s, x: experts(s, x, by_top),
    lambda s, x: experts(s, x, by_places),
    lambda s, x: experts(s, x, by_numbers),
    lambda s, x: experts(s, x, by_count),
    lambda s, x: experts(s, x, by_mask),
]


@pytest.mark.parametrize("forward", FORWARDS)
def test_never_the_way_pairs(forward: Any) -> None:
    gradient = PerExampleGradient(Layers(forward, c=nn.Linear(5, 6)), F.cross_entropy)
    try_out(gradient, EXAMPLE)
    assert gradient.way != "pairs"
    assert "a value decides" in gradient.reasons["pairs"]


HARMLESS = [
    lambda s, x: s.b(torch.tanh(s.a(x.sort(dim=-1)[0]))),
    lambda s, x: s.b(torch.tanh(s.a(x)).topk(6, dim=1)[0]),
    lambda s, x: s.b(torch.tanh(s.a(x)).cumsum(1)),
    lambda s, x: s.b(torch.tanh(s.a(x)).repeat_interleave(2, 0)[::2]),
    lambda s, x: s.b(torch.where(x[:, :1] > 0, s.a(x), 0)),
    lambda s, x: s.b(torch.tanh(s.a(x))[:, torch.ones(6).nonzero()[:, 0]]),
    lambda s, x: s.b(s.a(x.clone().index_put_((x > 1,), torch.tensor(0.0)))),
]


@pytest.mark.parametrize("forward", HARMLESS)
def test_within_an_example_they_are_followed(forward: Any) -> None:
    model, batch = Layers(forward), (torch.randn(4, 5), torch.arange(4) % 3)
    gradient, point = traced(model, cross_entropy, batch)
    for found, right in zip(rows(gradient, point, batch), alone(model, cross_entropy, batch), strict=True):
        torch.testing.assert_close(found.double(), right.double(), rtol=1e-4, atol=1e-6)


def branch(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.b(torch.tanh(s.a(x[x[:, 0].argsort()] if (x > FAR).any() else x)))


def labeled(s: Any, x: torch.Tensor) -> torch.Tensor:
    """Half of the rows twice, where as many are left out."""
    places = (torch.cat([x, x], 1).view(-1, 5)[:, 0] < FAR).nonzero()[:, 0]
    return s.b(torch.tanh(s.a(x[places // 2]))).view(len(x), -1, 3).sum(1)


@pytest.mark.parametrize("forward", [branch, packed, written, labeled])
def test_refused_when_values_come_that_made_up_examples_did_not_have(forward: Any) -> None:
    model, batch = Layers(forward), (torch.randn(4, 5), torch.arange(4) % 3)
    gradient, point = traced(model, cross_entropy, batch)
    for found, right in zip(rows(gradient, point, batch), alone(model, cross_entropy, batch), strict=True):
        torch.testing.assert_close(found.double(), right.double(), rtol=1e-4, atol=1e-6)
    batch[0][1:3, 0] = 2 * FAR
    with pytest.raises(UnknownLayout, match="by their values"):
        rows(gradient, point, batch)
