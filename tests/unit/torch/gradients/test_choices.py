"""Rows that are chosen or ordered by values among those of all examples: no shape tells whose they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpcore.torch.gradients.errors import Mixes, NotProved
from dpcore.torch.gradients.per_example import PerExampleGradient, try_out
from tests.unit.torch.gradients.one_by_one import Layers, assert_same, proved

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


def filled(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[mask] = 0.5
    return tensor


HARMLESS = [
    lambda s, x: s.b(torch.tanh(s.a(x.sort(dim=-1)[0]))),
    lambda s, x: s.b(torch.tanh(s.a(x)).topk(6, dim=1)[0]),
    lambda s, x: s.b(torch.tanh(s.a(x)).cumsum(1)),
    lambda s, x: s.b(torch.tanh(s.a(x)).repeat_interleave(2, 0).view(len(x), 2, 6)[:, 0]),
    lambda s, x: s.b(torch.where(x[:, :1] > 0, s.a(x), 0)),
    lambda s, x: s.b(s.a(filled(x, x > 1))),
    lambda s, x: s.b(filled(s.a(x), x[:, 0] > 0)),
    lambda s, x: s.b(filled(s.a(x).T, (s.a(x) > 0).T).T),
    lambda s, x: s.b(filled(s.a(x).T, torch.arange(6) % 2 == 0).T),
]


@pytest.mark.parametrize("forward", HARMLESS)
def test_within_an_example_they_are_followed(forward: Any) -> None:
    assert_same(Layers(forward), F.cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))


def branch(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.b(torch.tanh(s.a(x[x[:, 0].argsort()] if (x > FAR).any() else x)))


def labeled(s: Any, x: torch.Tensor) -> torch.Tensor:
    """Half of the rows twice, where as many are left out."""
    places = (torch.cat([x, x], 1).view(-1, 5)[:, 0] < FAR).nonzero()[:, 0]
    return s.b(torch.tanh(s.a(x[places // 2]))).view(len(x), -1, 3).sum(1)


@pytest.mark.parametrize("forward", [branch, packed, written, labeled])
def test_rows_that_values_choose_are_refused_though_made_up_values_choose_all(forward: Any) -> None:
    with pytest.raises(NotProved):
        proved(Layers(forward), F.cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.b(filled(s.a(x), torch.arange(len(x)) == 0)),
        lambda s, x: s.b(filled(s.a(x).T, (x > 0).sum(0)[[0, 1, 2, 3, 4, 4]] > 1).T),
    ],
)
def test_masks_that_are_not_the_examples_own_are_refused(forward: Any) -> None:
    with pytest.raises(Mixes, match=r"by a mask that is not their own|uses the examples' places in the batch"):
        proved(Layers(forward), F.cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))
