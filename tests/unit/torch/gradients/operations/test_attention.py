"""Attention with every option: its projections watched one by one, and torch's own one example at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from dpcore.stages.clipping.blocks import Linear
from tests.unit.torch.gradients.one_by_one import Readout, compare, randomized

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


class Attention(nn.Module):
    """Self-attention, of a query to a memory, or with keys and values of their own; padding that depends on numbers."""

    def __init__(self, sources: int, need_weights: bool, masked: bool, padded: bool, **options: Any) -> None:
        super().__init__()
        self.sources, self.need_weights, self.masked, self.padded = sources, need_weights, masked, padded
        self.attention = nn.MultiheadAttention(4, 2, **options)
        self.keys = nn.Linear(4, options.get("kdim") or 4)
        self.values = nn.Linear(4, options.get("vdim") or 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = self.attention.batch_first
        queries = x if first else x.transpose(0, 1)
        keys, values = self.keys(queries), self.values(queries)
        sources = [(queries,) * 3, (queries, keys, keys), (queries, keys, values)][self.sources]
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1) if self.masked else None
        padding = torch.arange(x.shape[1]) > (x[:, :1, 0] > 0).long() + 1 if self.padded else None
        out, weights = self.attention(
            *sources,
            attn_mask=mask,
            key_padding_mask=padding,
            need_weights=self.need_weights,
            average_attn_weights=self.padded,
            is_causal=self.masked and not self.need_weights,
        )
        out = out if first else out.transpose(0, 1)
        return out.tanh() if weights is None else torch.cat([out.tanh().flatten(1), weights.flatten(1)], 1)


@given(
    sources=st.sampled_from([0, 1, 2]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    options=st.fixed_dictionaries({
        "batch_first": st.booleans(),
        "bias": st.booleans(),
        "add_bias_kv": st.booleans(),
        "add_zero_attn": st.booleans(),
    }),
    own_sizes=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_attention(sources, flags, options, own_sizes, dtype):
    assume(sources == 2 or not own_sizes)
    sizes = {"kdim": 3, "vdim": 5} if own_sizes else {}
    model = Readout(Attention(sources, *flags, **options, **sizes), nn.Linear(3, 4))
    compare(randomized(model, dtype), (4, 3), dtype)


@pytest.mark.parametrize("batch_first", [False, True])
def test_transformers(batch_first):
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Transformer(4, 2, 1, 2, 8, dropout=0.0, batch_first=batch_first)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            source = x if batch_first else x.transpose(0, 1)
            target = x[:, :2] if batch_first else source[:2]
            out = self.inner(source, target, tgt_mask=self.inner.generate_square_subsequent_mask(2))
            return out if batch_first else out.transpose(0, 1)

    compare(randomized(Whole()), (3, 4))


def test_projections_are_pairs():
    blocks = compare(randomized(Attention(1, True, False, False)), (5, 4))
    together, out = blocks[0], blocks[2]
    assert isinstance(together, Linear)
    assert (together.shape, len(together.inputs)) == ((12, 4), 2)
    assert isinstance(out, Linear)
    assert out.inputs[0].shape == (3, 5, 4)


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_takes_torchs_numbers(need_weights):
    """One example in the batch: the rule and torch draw the same mask from the same state."""
    compare(randomized(Attention(0, need_weights, False, False, dropout=0.5)), (4, 4), examples=1)
