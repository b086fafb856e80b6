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
from tests.unit.torch.models import Called
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


def two_inputs() -> nn.Module:
    return Called(lambda m, left, right: m.a(left) * m.b(right), a=nn.Linear(3, 2), b=nn.Linear(5, 2))


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    """A kind that vmap cannot batch."""
    return Called(lambda m, x: m.head(m.cell(x)[0][:, -1]), cell=kind(3, 4, batch_first=True), head=nn.Linear(4, 2))


def labels(n: int, classes: int) -> torch.Tensor:
    return torch.arange(n) % classes


# fmt: off
CASES = {
    "cnn-5": lambda: (build("cnn-5", (1, 8, 8), 10), F.cross_entropy, (torch.randn(4, 1, 8, 8), labels(4, 10))),
    "mlp float64": lambda: (
        build("mlp", (6,), 3).double(), F.cross_entropy, (torch.randn(5, 6, dtype=torch.float64), labels(5, 3))),
    "tied": lambda: (Tied(), F.cross_entropy, (torch.randint(0, 9, (4, 3)), labels(4, 9))),
    "a layer twice": lambda: (repeated(), F.cross_entropy, (torch.randn(4, 3), labels(4, 2))),
    "two inputs": lambda: (two_inputs(), F.mse_loss, ((torch.randn(4, 3), torch.randn(4, 5)), torch.randn(4, 2))),
    "keywords": lambda: (
        two_inputs(), lambda out: out.square().sum(), {"right": torch.randn(4, 5), "left": torch.randn(4, 3)}),
    "RNN": lambda: (recurrent(nn.RNN), F.cross_entropy, (torch.randn(4, 5, 3), labels(4, 2))),
    "GRU": lambda: (recurrent(nn.GRU), F.cross_entropy, (torch.randn(4, 5, 3), labels(4, 2))),
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
