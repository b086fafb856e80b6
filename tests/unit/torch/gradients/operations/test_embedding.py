"""Lookups, and bags of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpcore.errors import ArgumentError
from dpcore.stages.clipping.blocks import Embedding
from dpcore.torch.gradients.errors import Mixes, NotProved
from tests.unit.torch.gradients.one_by_one import compare, randomized

TOKENS = 5


def tokens(x: torch.Tensor) -> torch.Tensor:
    """Made-up numbers as tokens, some of them equal."""
    return (x * 100).long() % TOKENS


class Lookup(nn.Module):
    def __init__(self, padding: int | None, turns: int) -> None:
        super().__init__()
        self.table, self.turns = nn.Embedding(TOKENS, 3, padding_idx=padding), turns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.table(tokens(x))
        return found if self.turns == 1 else found * self.table(tokens(x).flip(1))


class Bag(nn.Module):
    def __init__(self, weighted: bool, folded: bool, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(TOKENS, 3, **options)
        self.factor = nn.Parameter(torch.ones(4)) if weighted else None
        self.folded = folded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bags = torch.cat([x, x.flip(1) + 1], 1).reshape(-1, x.shape[1]) if self.folded else x
        weights = None if self.factor is None else bags * self.factor
        found = self.table(tokens(bags), per_sample_weights=weights)
        return found.unflatten(0, (len(x), -1))


@given(
    padding=st.sampled_from([None, 0, -1]),
    turns=st.sampled_from([1, 2]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_lookups(padding, turns, dtype):
    (block,) = compare(randomized(Lookup(padding, turns), dtype), (4,), dtype)
    assert isinstance(block, Embedding)


@given(
    weighted=st.booleans(),
    folded=st.booleans(),
    padding=st.sampled_from([None, 1]),
    mode=st.sampled_from(["mean", "sum"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_bags(weighted, folded, padding, mode, dtype):
    mode = "sum" if weighted else mode
    blocks = compare(randomized(Bag(weighted, folded, mode=mode, padding_idx=padding), dtype), (4,), dtype)
    assert any(isinstance(block, Embedding) for block in blocks)


@pytest.mark.parametrize("options", [{"mode": "max"}, {"max_norm": 1.0}, {"mode": "sum", "scale_grad_by_freq": True}])
def test_bags_that_are_refused(options):
    with pytest.raises(NotProved, match="embedding_bag has a rule for bags of one length alone"):
        compare(randomized(Bag(False, False, **options)), (4,))


def test_tables_that_a_lookup_changes_are_refused():
    model = Lookup(None, 1)
    model.table.max_norm = 1.0
    with pytest.raises(ArgumentError, match=r"'table' .* changes its parameter 'weight'"):
        compare(randomized(model), (4,))


def test_gradients_divided_by_how_often_all_examples_hold_a_token_are_refused():
    model = Lookup(None, 1)
    model.table.scale_grad_by_freq = True
    with pytest.raises(Mixes, match="how often all examples hold a token"):
        compare(randomized(model), (4,))
