"""The tracer against one-by-one autograd: what models do with their parameters, and what it must refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from dpcore.errors import ArgumentError
from dpcore.torch.gradients.per_example import PerExampleGradient
from dpcore.torch.gradients.trial import try_out
from dpcore.torch.sources.places import UnknownLayout
from tests.unit.torch.sources.traced_models import Layers, alone, assert_same, cross_entropy, rows, traced


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def made(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.5)


def plain(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.b(torch.tanh(s.a(x)))


def changed(tensor: torch.Tensor, method: str, *args: Any) -> torch.Tensor:
    """A tensor after a method that changes it in place."""
    getattr(tensor, method)(*args)
    return tensor


def changed_of_two_names(tensor: torch.Tensor, method: str, *args: Any) -> torch.Tensor:
    changed(tensor, method, *args)
    return torch.sin(tensor)


def part_doubled(tensor: torch.Tensor, factor: Any) -> torch.Tensor:
    tensor[:, :2].mul_(factor)  # a view
    return tensor


def written(tensor: torch.Tensor, place: Any, value: Any) -> torch.Tensor:
    tensor[place] = value
    return tensor


def time_major(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.b(torch.tanh(s.a(x.transpose(0, 1)))).mean(0)


def folded(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.b(torch.tanh(s.a(x.reshape(-1, 5)))).view(x.shape[0], -1, 3).mean(1)


def folded_by_time(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.b(torch.tanh(s.a(x.transpose(0, 1).reshape(-1, 5)))).view(x.shape[1], x.shape[0], 3).mean(0)


@pytest.mark.parametrize("times", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    "forward",
    [
        time_major,
        folded,
        lambda s, x: plain(s, x).mean(1),
        lambda s, x: plain(s, x + s.position).mean(1),
        lambda s, x: s.b(torch.tanh(changed(s.a(x), "add_", s.shift))).mean(1),
        lambda s, x: s.b(torch.tanh(changed(s.a(x), "mul_", s.shift))).mean(1),
    ],
)
def test_other_sizes_may_be_the_number_of_examples(forward: Any, times: int) -> None:
    model = Layers(forward, position=made(1, times, 5), shift=made(times, 6))
    assert_same(model, cross_entropy, (torch.randn(4, times, 5), torch.arange(4) % 3), sizes=(4, 3, 2, 1))


def test_a_parameter_with_the_examples_in_two_places() -> None:
    model = Layers(lambda s, x: plain(s, s.c(s.c(x.transpose(0, 1)).transpose(0, 1))).mean(1), c=nn.Linear(5, 5))
    batch = torch.randn(5, 4, 5), torch.arange(5) % 3
    assert_same(model, cross_entropy, batch, sizes=(5, 3, 2))
    gradient, point = traced(model, cross_entropy, batch)
    with pytest.raises(UnknownLayout, match="linear"):  # four examples and four times: nobody can tell which is which
        rows(gradient, point, tuple(t[:4] for t in batch))


VECTORS = [
    lambda s, x: s.b(F.relu_(s.a(x))),
    lambda s, x: s.b(part_doubled(s.a(x), 2.0)),  # a view of what was tapped
    lambda s, x: s.b(changed_of_two_names(torch.tanh(s.a(x)) * 1.0, "mul_", s.scale)),
    lambda s, x: s.b(changed_of_two_names(s.a(x), "__iadd__", s.scale)),
    lambda s, x: s.b(F.linear(x, changed(s.a.weight.clone(), "mul_", 2.0))),
    lambda s, x: s.b(F.linear(x, written(s.a.weight.clone(), slice(1, 3), 0.0))),
    lambda s, x: s.b(F.linear(x, part_doubled(s.a.weight.clone().T, s.scale[:5, None]).T)),
    lambda s, x: plain(s, x) + F.linear(s.a(x).detach(), s.b.weight.detach()) + (x @ s.a.weight.data.T)[:, :3],
    lambda s, x: s.b(torch.tanh(s.a.weight @ x.T).T),
    lambda s, x: plain(s, x @ s.square.T + x @ s.square + x @ s.square.transpose(0, 0)),
    lambda s, x: plain(s, x @ s.square[:2].T @ s.square[:2] + F.linear(x, s.square.chunk(2)[0]).sum(1, keepdim=True)),
    lambda s, x: plain(s, F.linear(x, s.hyper(s.scale).view(5, 5))),
    lambda s, x: plain(s, torch.bmm(s.per(x).view(-1, 5, 5), x.unsqueeze(-1)).squeeze(-1)),
    lambda s, x: plain(s, torch.where(x[:, :1] > 0, x, s.square[0])) * (x[:, :1] > 0),  # not used by all examples
    lambda s, x: s.b(checkpoint(lambda z: torch.tanh(s.a(z)), x, use_reentrant=False)),
    lambda s, x: s.b(checkpoint(lambda z: torch.tanh(s.a(z)), s.per(x)[:, :5], use_reentrant=True)),
    lambda s, x: s.b(checkpoint(lambda z: torch.tanh(F.linear(z, s.a.weight * s.a.weight)), x, use_reentrant=False)),
    lambda s, x: plain(s, x) * F.mse_loss(s.a.weight, torch.zeros(6, 5)),
    lambda s, x: plain(s, x) + torch.zeros_like(s.b.bias) + s.b.bias.new_zeros(len(x), 3),
    lambda s, x: plain(s, x[:, [1, 0, 2, 3, 4]]) - plain(s, x),
]


@pytest.mark.parametrize("forward", VECTORS)
def test_vectors(forward: Any) -> None:
    model = Layers(forward, scale=made(6), square=made(5, 5), hyper=nn.Linear(6, 25), per=nn.Linear(5, 25))
    assert_same(model, cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))


SEQUENCES = [
    lambda s, x: s.b(torch.tanh(s.a(x)).mean(1) - torch.tanh(s.a(x[:, :2])).mean(1)),
    lambda s, x: s.b(
        s.a(x.reshape(-1, 5)).view(len(x), -1, 6).mean(1) - s.a(x[:, :2].reshape(-1, 5)).view(-1, 2, 6)[:, 0]
    ),
    lambda s, x: plain(s, torch.cat([s.token.expand(len(x), -1, -1), x], 1)).mean(1),
    lambda s, x: plain(s, torch.cat([s.token.repeat(len(x), 1, 1), x], 1)).mean(1),
    lambda s, x: plain(s, torch.softmax(s.queries @ x.transpose(1, 2), -1) @ x).mean(1),
    lambda s, x: s.b(torch.tanh(torch.einsum("btd,od->bto", x, s.a.weight)).mean(1)),
    lambda s, x: plain(s, x + s.table(torch.arange(x.shape[1]))).mean(1),
    lambda s, x: plain(s, x + s.table(torch.arange(x.shape[1]).expand(1, -1)) * 2).mean(1),
]


@pytest.mark.parametrize("forward", SEQUENCES)
def test_sequences(forward: Any) -> None:
    model = Layers(forward, token=made(1, 1, 5), queries=made(2, 5), table=nn.Embedding(9, 5, padding_idx=0))
    assert_same(model, cross_entropy, (torch.randn(4, 3, 5), torch.arange(4) % 3))


@pytest.mark.parametrize("change", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_weights_made_of_parameters(change: Any) -> None:
    model = Layers(plain)
    change(model.a)
    assert_same(model, cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))


def test_transformer_of_either_order() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = Layers(lambda s, x: s.b(s.encoder(s.a(x).transpose(0, 1))).mean(0), encoder=encoder)
    assert_same(model, cross_entropy, (torch.randn(4, 3, 5), torch.arange(4) % 3))
    whole = nn.Transformer(6, 2, 1, 1, 9, dropout=0.0, batch_first=True)
    model = Layers(lambda s, x: s.b(s.whole(s.a(x), s.a(x[:, :2]))).mean(1), whole=whole)
    assert_same(model, cross_entropy, (torch.randn(4, 3, 5), torch.arange(4) % 3))


class Plain(nn.Module):
    """For torch.compile, which must see the code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x)


def test_compiled_models() -> None:
    batch = torch.randn(4, 5), torch.arange(4) % 3
    assert_same(torch.compile(Plain(), backend="eager"), cross_entropy, batch)
    model = Plain()
    model.compile(backend="eager")
    model.a.compile(backend="eager")
    assert_same(model, cross_entropy, batch)


def test_autocast_and_small_floats() -> None:
    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = torch.sigmoid(s.norm(s.a(x) * s.scale)) ** s.scale.sigmoid()
            return s.b(h) + torch.tensordot(h, s.form, 1)

    model = Layers(forward, form=made(6, 3), norm=nn.LayerNorm(6), scale=made(6))
    assert_same(model, cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3), tolerance=5e-2)
    small = Layers(lambda s, x: plain(s, x * s.scale).float(), scale=made(5)).bfloat16()
    assert_same(small, cross_entropy, (torch.randn(4, 5).bfloat16(), torch.arange(4) % 3), tolerance=5e-2)


def test_tied_and_unused_parameters_and_no_examples() -> None:
    model = Layers(lambda s, x: s.b(torch.tanh(s.d(torch.tanh(s.c(x))))), c=nn.Linear(5, 5), d=nn.Linear(5, 6))
    model.a.weight = model.d.weight
    model.c.weight = nn.Parameter(model.c.weight.detach()[:, :5])
    batch = torch.randn(4, 5), torch.arange(4) % 3
    assert_same(model, cross_entropy, batch)
    gradient, point = traced(model, cross_entropy, batch)
    none = rows(gradient, point, tuple(t[:0] for t in batch))
    assert [tuple(row.shape) for row in none] == [(0, p.numel()) for p in point]


def test_frozen_parts_cost_nothing() -> None:
    model = Layers(plain)
    model.a.requires_grad_(False)
    gradient, _ = traced(model, cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))
    assert list(gradient.sites._learned) == [(F.linear, ((0,), (1,)))]
    assert_same(model, cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))


def test_layers_left_out_at_random() -> None:
    """LayerDrop: an operation of one pass is missing in another."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.1)
        for layer in s.layers:
            if torch.rand([]) > s.rate:
                x = torch.tanh(layer(x))
        return s.b(s.a(x))

    model = Layers(forward, layers=nn.ModuleList(nn.Linear(5, 5) for _ in range(4)), rate=0.0)
    batch = torch.randn(4, 5), torch.arange(4) % 3
    gradient, point = traced(model, cross_entropy, batch)
    model.rate, seen = 0.5, set()
    for seed in range(6):
        torch.manual_seed(seed)
        found = rows(gradient, point, batch)
        torch.manual_seed(seed)
        F.cross_entropy(model(batch[0]), batch[1], reduction="sum").backward()
        for row, parameter in zip(found, model.parameters(), strict=True):
            right = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(row.sum(0), right.flatten().double(), rtol=1e-4, atol=1e-6)
            parameter.grad = None
        seen.add(tuple(row.any().item() for row in found))
    assert len(seen) > 1


def test_layers_left_out_while_learning() -> None:
    """The runs of learning leave out the same layers, though other numbers are drawn for other examples."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(s, torch.tanh(s.c(F.dropout(x, 0.1))) if torch.rand([]) > 0.5 else x)

    for seed in range(8):
        torch.manual_seed(seed)
        traced(Layers(forward, c=nn.Linear(5, 5)), cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))


def test_models_that_do_something_else_each_time_are_refused() -> None:
    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        s.count += 1
        return plain(s, x * 1.0 if s.count % 3 == 0 else x)

    with pytest.raises(UnknownLayout, match="runs again"):
        traced(Layers(forward, count=0), cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))


def test_checkpoints_at_another_point() -> None:
    """What parameters make inside a checkpoint is of the point, not of the model's own values."""

    def inside(s: Any, z: torch.Tensor) -> torch.Tensor:
        weight = s.a.weight * s.a.weight
        return F.linear(F.linear(z, weight).sin(), weight.T.sin())

    for reentrant in (False, True):
        model = Layers(lambda s, x: plain(s, checkpoint(inside, s, s.c(x), use_reentrant=reentrant)), c=nn.Linear(5, 5))  # noqa: B023
        batch = torch.randn(4, 5), torch.arange(4) % 3
        gradient, point = traced(model, cross_entropy, batch)
        found = rows(gradient, [2 * value for value in point], batch)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        for row, right in zip(found, alone(model, cross_entropy, batch), strict=True):
            torch.testing.assert_close(row, right, rtol=1e-4, atol=1e-6)


class Product(torch.autograd.Function):
    """A product that torch does not show."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


def differentiates_itself(s: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (inner,) = torch.autograd.grad(s.a(x).pow(2).sum(), x, create_graph=True)
    return plain(s, inner)


def used_and_changed(s: Any, x: torch.Tensor) -> torch.Tensor:
    weight = s.a.weight * 1.5
    h = F.linear(x, weight)
    return s.b(h + F.linear(x, changed(weight, "mul_", 2.0)))


REFUSED = [
    (lambda s, x: s.b(torch.tanh(Product.apply(x, s.a.weight))), "does not show"),
    (lambda s, x: s.b(torch.tanh(Product.apply(x, s.a.weight * 2))), "does not show"),
    (lambda s, x: s.b(torch.tanh(torch.vmap(lambda z: F.linear(z, s.a.weight))(x))), "does not show"),
    (lambda s, x: plain(s, written(x.clone(), (slice(None), 0), s.b.bias[0])), "does not show"),
    (differentiates_itself, "gradients of its own"),
    (used_and_changed, "used and then changed in place"),
    (lambda s, x: plain(s, x) + torch.einsum("bd,od->o", x, s.a.weight)[:3], "takes all examples"),
    (lambda s, x: plain(s, torch.cat([x, s.a.weight[:1]]))[:-1], "cat of tensors of shapes"),
    (lambda s, x: torch.cat([plain(s, row[None]) for row in x]), "other operations for another number"),
]


@pytest.mark.parametrize(("forward", "reason"), REFUSED)
def test_what_is_refused(forward: Any, reason: str) -> None:
    with pytest.raises(UnknownLayout, match=reason):
        traced(Layers(forward), cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))


def test_operations_that_made_up_examples_did_not_show() -> None:
    """A branch that the data choose is refused when it comes."""
    model = Layers(lambda s, x: plain(s, x) if (x > -50).all() else s.b(s.c(x)), c=nn.Linear(5, 6))
    gradient, point = traced(model, cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))
    with pytest.raises(UnknownLayout, match="examples are not found"):
        rows(gradient, point, (torch.full((4, 5), -99.0), torch.arange(4) % 3))


ON_VALUES = [
    folded_by_time,
    lambda s, x: s.b(torch.tanh(s.a(torch.cat([x[:, 0], x[:, 1]])))).view(2, len(x), 3).sum(0),
    lambda s, x: plain(s, x[(order := x[:, 0, 0].argsort())])[order.argsort()].mean(1),
    lambda s, x: plain(s, x - x.mean(0)).mean(1),
    lambda s, x: plain(s, x).mean(1) + s.a(x[0, 0])[:3],
]


@pytest.mark.parametrize("forward", ON_VALUES)
def test_what_shapes_cannot_tell_is_found_on_values(forward: Any) -> None:
    """Rows in another order, and examples that mix: never the way "pairs"."""
    model = Layers(forward)
    gradient = PerExampleGradient(model, F.cross_entropy)
    batch = torch.randn(4, 3, 5), torch.arange(4) % 3
    try:
        try_out(gradient, batch)
    except ArgumentError:  # a model that mixes examples is refused
        return
    # Rows in the order of time are in the order of the examples for the proof, which follows where they lie.
    assert (gradient.way == "pairs") == (forward is folded_by_time)
    blocks = gradient(gradient.parameters(), batch)
    for block, right in zip(blocks, alone(model, cross_entropy, batch), strict=True):
        torch.testing.assert_close(block.rows().double(), right, rtol=1e-4, atol=1e-6)
