"""Convolutions of every form: as rows, as pairs, and by torch one example at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from dpcore.stages.clipping.blocks import Linear, Rows
from tests.unit.torch.gradients.one_by_one import Readout, compare, randomized

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
PAIRS = "dpcore.torch.gradients.convolution._PAIRS"
KINDS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
TRANSPOSED = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


class Folded(nn.Module):
    """Two images of each example, which a convolution sees as examples of their own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.stack([x, x.flip(1)], 1).flatten(0, 1)
        return self.inner(both).unflatten(0, (len(x), 2))


def check(module: nn.Module, dims: int, dtype: torch.dtype, folded: bool, pairs: float) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PAIRS, pairs)
        model = Readout(Folded(module) if folded else module, nn.Linear(5, 5))
        blocks = compare(randomized(model, dtype), (4, *[5] * dims), dtype)
    return blocks[2]


@given(
    dims=st.sampled_from([1, 2, 3]),
    options=st.fixed_dictionaries({
        "kernel_size": st.sampled_from([1, 2, 3]),
        "stride": st.sampled_from([1, 2, 3]),
        "dilation": st.sampled_from([1, 2]),
        "padding": st.sampled_from([0, 1, 2, "same", "valid"]),
        "padding_mode": st.sampled_from(["zeros", "zeros", "circular"]),
        "groups": st.sampled_from([1, 1, 2, 4]),
        "bias": st.booleans(),
    }),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    folded=st.booleans(),
    pairs=st.sampled_from([0.0, 1e9]),
)  # fmt: skip
def test_convolutions(dims, options, dtype, folded, pairs):
    assume(options["padding"] != "same" or options["stride"] == 1)
    block = check(KINDS[dims - 1](4, 8, **options), dims, dtype, folded, pairs)
    assert isinstance(block, Linear if pairs == 0 and options["groups"] == 1 else Rows)


@given(
    dims=st.sampled_from([1, 2, 3]),
    options=st.fixed_dictionaries({
        "kernel_size": st.sampled_from([1, 2, 3]),
        "stride": st.sampled_from([1, 2]),
        "dilation": st.sampled_from([1, 2]),
        "padding": st.sampled_from([0, 1]),
        "output_padding": st.sampled_from([0, 1]),
        "groups": st.sampled_from([1, 1, 2]),
        "bias": st.booleans(),
    }),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    folded=st.booleans(),
    pairs=st.sampled_from([0.0, 1e9]),
)  # fmt: skip
def test_transposed_convolutions(dims, options, dtype, folded, pairs):
    assume(options["output_padding"] < max(options["stride"], options["dilation"]))
    block = check(TRANSPOSED[dims - 1](4, 6, **options), dims, dtype, folded, pairs)
    assert isinstance(block, Linear if pairs == 0 and options["groups"] == 1 else Rows)


def test_different_numbers_for_each_dimension():
    options = {"kernel_size": (1, 3), "stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)}
    for pairs in (0.0, 1e9):
        check(nn.Conv2d(4, 3, **options), 2, torch.float64, False, pairs)
        check(nn.ConvTranspose2d(4, 3, **options, output_padding=(1, 0)), 2, torch.float64, False, pairs)
        check(nn.Conv2d(4, 3, (2, 3), padding="same"), 2, torch.float64, False, pairs)


def test_large_matrices_of_few_places_are_pairs_and_small_ones_rows():
    few, many = nn.Conv2d(16, 16, 3), nn.Conv2d(1, 4, 3, padding=1)
    assert isinstance(compare(randomized(few), (16, 3, 3))[0], Linear)
    assert isinstance(compare(randomized(many), (1, 8, 8))[0], Rows)


def test_bfloat16():
    check(nn.Conv2d(4, 3, 3), 2, torch.bfloat16, False, 1e9)


def test_weights_that_are_made_of_others():
    compare(randomized(nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 3, 2))), (4, 5))


def test_rows_in_chunks(monkeypatch):
    monkeypatch.setattr("dpcore.torch.gradients.convolution._CHUNK", 2 * 3 * 4 * 2 * 8)
    for folded in (False, True):
        check(nn.Conv1d(4, 3, 2), 1, torch.float64, folded, 1e9)
        check(nn.ConvTranspose1d(4, 3, 2), 1, torch.float64, folded, 1e9)
