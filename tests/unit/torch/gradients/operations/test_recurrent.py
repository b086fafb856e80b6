"""Recurrent layers and cells: as operations of dpcore, and by torch one example at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpcore.stages.clipping.blocks import Linear
from dpcore.torch.gradients.errors import NotProved
from tests.unit.torch.gradients.one_by_one import Readout, compare, randomized

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:dropout option adds")


class Layer(nn.Module):
    """A recurrent layer with trained first states; all that it returns is in the output."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(3, 4, **options)
        ways = self.layer.num_layers * (1 + self.layer.bidirectional)
        self.hidden = nn.Parameter(torch.zeros(ways, 1, self.layer.proj_size or 4))
        self.memory = nn.Parameter(torch.zeros(ways, 1, 4)) if kind is nn.LSTM else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        hidden = self.hidden.expand(-1, count, -1)
        x = x if self.layer.batch_first else x.transpose(0, 1)
        if self.memory is None:
            out, last = self.layer(x, hidden)
            states = [last]
        else:
            out, states = self.layer(x, (hidden, self.memory.expand(-1, count, -1)))
        out = out if self.layer.batch_first else out.transpose(0, 1)
        return torch.cat([out.flatten(1), *(state.transpose(0, 1).flatten(1) for state in states)], 1)


class Loop(nn.Module):
    """A cell, called for each time."""

    def __init__(self, kind: type[nn.RNNCellBase], **options: Any) -> None:
        super().__init__()
        self.cell = kind(3, 4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


@given(
    kind=st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]),
    options=st.fixed_dictionaries({
        "num_layers": st.sampled_from([1, 2]),
        "bidirectional": st.booleans(),
        "batch_first": st.booleans(),
        "bias": st.booleans(),
    }),
    times=st.sampled_from([1, 2, 5]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    special=st.booleans(),
    frozen=st.booleans(),
)  # fmt: skip
def test_layers(kind, options, times, dtype, special, frozen):
    more = {"nonlinearity": "relu"} if special and kind is nn.RNN else {}
    layer = Layer(kind, **options, **more)
    if frozen:
        layer.layer.weight_ih_l0.requires_grad_(False)
    compare(randomized(Readout(layer, nn.Linear(3, 3)), dtype), (times, 3), dtype)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cells(kind, bias, dtype):
    compare(randomized(Readout(Loop(kind, bias=bias), nn.Linear(3, 3)), dtype), (4, 3), dtype)


def test_relu_cell():
    compare(randomized(Readout(Loop(nn.RNNCell, nonlinearity="relu"))), (4, 3))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_recurrent_weight_is_one_pair_of_all_times(kind):
    blocks = compare(randomized(Layer(kind, batch_first=True)), (6, 3))
    for block in blocks:
        if isinstance(block, Linear):
            assert [a.shape[:2] for a in block.inputs] == [(3, 6)]
    assert sum(isinstance(block, Linear) for block in blocks) == 2


def test_dropout_between_layers_takes_torchs_numbers():
    """One example in the batch: the rule and torch draw the same mask from the same state."""
    layer = Layer(nn.GRU, num_layers=2, dropout=0.5, batch_first=True)
    compare(randomized(layer), (4, 3), examples=1)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


def test_packed_sequences_and_projections_are_refused():
    """Lengths are values, of which a graph knows nothing."""
    with pytest.raises(NotProved, match="a value decides"):
        compare(Packed().double(), (4, 3))
    with pytest.raises(NotProved, match="projections"):
        compare(Layer(nn.LSTM, proj_size=2).double(), (4, 3))
