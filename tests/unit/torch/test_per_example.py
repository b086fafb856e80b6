"""Per-example gradients equal a loop over examples with autograd, whatever the model; points are independent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.torch.data import batches
from dpcore.torch.gradients.per_example import WAYS, PerExampleGradient
from dpcore.torch.model.models import build
from tests.unit.torch.peak import peak_bytes
from tests.unit.torch_runs import Tied


def loop(model: nn.Module, loss: Callable, batch: tuple) -> list[torch.Tensor]:
    """The definition: one backward pass per example."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(batches.size(batch)):
        one = batches.tree_map(lambda t: t[i : i + 1], batch)  # noqa: B023
        inputs, targets = batches.normalize(one)
        total = loss(batches.call(model, inputs), *targets).sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)])
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def repeated() -> nn.Module:
    """One layer under two names, and a weight of it tied to another layer."""
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 3), nn.Linear(3, 2))
    model[3].weight = layer.weight
    return model


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(5, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.a(left) * self.b(right)


class Recurrent(nn.Module):
    """A recurrent layer or cell."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = kind(3, 4), nn.Linear(4, 2)
        self.cell.batch_first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.cell, nn.RNNBase):
            return self.head(self.cell(x)[0][:, -1])
        state = self.cell(x[:, 0])
        return self.head(state[0] if isinstance(state, tuple) else state)


RECURRENT = (nn.RNN, nn.GRU, nn.RNNCell, nn.GRUCell, nn.LSTMCell)


def labels(n: int, classes: int) -> torch.Tensor:
    return torch.arange(n) % classes


# fmt: off
CASES = {
    "cnn-5": lambda: (build("cnn-5", (1, 8, 8), 10), F.cross_entropy, (torch.randn(4, 1, 8, 8), labels(4, 10))),
    "mlp float64": lambda: (
        build("mlp", (6,), 3).double(), F.cross_entropy, (torch.randn(5, 6, dtype=torch.float64), labels(5, 3))),
    "tied": lambda: (Tied(), F.cross_entropy, (torch.randint(0, 9, (4, 3)), labels(4, 9))),
    "a layer twice": lambda: (repeated(), F.cross_entropy, (torch.randn(4, 3), labels(4, 2))),
    "two inputs": lambda: (TwoInputs(), F.mse_loss, ((torch.randn(4, 3), torch.randn(4, 5)), torch.randn(4, 2))),
    "keywords": lambda: (
        TwoInputs(), lambda out: out.square().sum(), {"right": torch.randn(4, 5), "left": torch.randn(4, 3)}),
    **{kind.__name__: lambda kind=kind: (Recurrent(kind), F.cross_entropy, (torch.randn(4, 5, 3), labels(4, 2)))
       for kind in RECURRENT},
    "groupnorm": lambda: (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)),
        F.cross_entropy, (torch.randn(4, 1, 8, 8), labels(4, 2))),
    "transformer": lambda: (
        nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.Flatten(), nn.Linear(12, 2)),
        F.cross_entropy, (torch.randn(4, 3, 4), labels(4, 2))),
    "frozen layer": lambda: (
        nn.Sequential(nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 2)),
        F.cross_entropy, (torch.randn(4, 3), labels(4, 2))),
    "unused parameter": lambda: (
        nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}),
        F.mse_loss, (torch.randn(4, 3), torch.randn(4, 2)))
}
# fmt: on


def rows(gradient: PerExampleGradient, *call: Any, **options: Any) -> list[torch.Tensor]:
    """The blocks as explicit gradients."""
    shapes = [value.shape for value in gradient.parameters()]
    blocks = gradient(*call, **options)
    return [block.rows().reshape(-1, *shape) for block, shape in zip(blocks, shapes, strict=True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_equals_the_loop_over_examples(make: Callable, way: str) -> None:
    torch.manual_seed(0)
    model, loss, batch = make()
    if isinstance(model, nn.ModuleDict):
        model.forward = model["used"].forward  # type: ignore[method-assign]
    gradient = PerExampleGradient(model, loss, way)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    got = rows(gradient, [value.clone() for value in gradient.parameters()], batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    want = loop(model, loss, batch)
    assert len(got) == len(want) == len(gradient.names)
    assert not isinstance(model, Tied) or gradient.names == ("embed.weight",)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert max(t.abs().max().item() for t in want) > 1e-3
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_same_seed_same_dropout_masks_and_examples_differ(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 200), nn.Dropout(0.5))
    gradient = PerExampleGradient(model, lambda out: out.sum(), way)
    batch = torch.ones(3, 1)
    state = torch.get_rng_state()
    at = gradient.parameters()
    first = rows(gradient, at, batch, seed=bytes([1]))[1]
    same = rows(gradient, [p * 2 for p in at], batch, seed=bytes([1]))[1]
    other = rows(gradient, at, batch, seed=bytes([2]))[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(first[0], first[1])
    model.eval()
    assert torch.equal(rows(gradient, at, batch)[1], torch.ones(3, 200))


@pytest.mark.parametrize("way", WAYS)
def test_an_error_on_private_data_quotes_nothing_of_it(way: str) -> None:
    gradient = PerExampleGradient(nn.Linear(3, 2), F.cross_entropy, way)
    with pytest.raises(ArgumentError, match=r"check labels.*may hold private values") as caught:
        gradient(gradient.parameters(), (torch.randn(4, 3), torch.tensor([0, 1, 1, 73])))
    assert "73" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_loss_must_be_one_number() -> None:
    gradient = PerExampleGradient(nn.Linear(3, 2), lambda out: out, "one-by-one")
    with pytest.raises(ArgumentError, match="one number"):
        gradient(gradient.parameters(), torch.randn(2, 3))


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentTypeError, match=r"torch\.nn\.Module"):
        PerExampleGradient(object(), F.cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="loss="):
        PerExampleGradient(nn.Linear(2, 2), "mse")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="requires gradients"):
        PerExampleGradient(nn.Linear(2, 2).requires_grad_(False), F.cross_entropy)


class Language(nn.Module):
    """Its loss takes far more memory than all that is before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(2000, 8), nn.Linear(8, 2000)
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix(self.embed(tokens))).transpose(1, 2)


def test_the_peak_is_that_of_the_real_call_and_grows_with_the_examples() -> None:
    gradient = PerExampleGradient(Language(), F.cross_entropy)

    def peak(examples: int) -> int:
        batch = tuple(torch.randint(2000, (examples, 64)) for _ in range(2))
        gradient(gradient.parameters(), batch, synthetic=True)  # captured before it is measured
        return peak_bytes(lambda: gradient(gradient.parameters(), batch, synthetic=True))

    one, two, ten = peak(1), peak(2), peak(10)
    logits = 4 * 64 * 2000
    assert two - one > 2 * logits  # at least the logits and their softmax
    assert ten == pytest.approx(one + 9 * (two - one), rel=0.1)


def test_the_peak_counts_what_lives_at_one_time() -> None:
    # Twice two tensors, the first ones freed before the next.
    peak = peak_bytes(lambda: [torch.empty(10**6).add(1) is None for _ in range(2)])
    assert 8 * 10**6 <= peak < 9 * 10**6  # and some objects of Python's
    given = torch.zeros(10**6)
    assert peak_bytes(lambda: given.reshape(10, 10**5).t()) < given.nbytes
