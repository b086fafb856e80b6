"""Graphs against one-by-one autograd: what models do with their parameters, losses of any form, and what is refused."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpcore.errors import ArgumentError
from dpcore.torch.gradients.cache import structure
from dpcore.torch.gradients.errors import Mixes, NotCaptured, NotProved
from dpcore.torch.gradients.per_example import PerExampleGradient, try_out
from dpcore.torch.model.functional import Values
from tests.depth import pairs
from tests.unit.torch.gradients.one_by_one import alone, assert_same, blocks, layers, program, proved, rows


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def made(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)


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


@pytest.mark.parametrize(
    ("forward", "times"),
    [
        (time_major, 1),
        (time_major, 4),
        (folded, 4),
        (lambda s, x: plain(s, x + s.position).mean(1), 1),
        (lambda s, x: s.b(torch.tanh(changed(s.a(x), "add_", s.shift))).mean(1), 4),
        (lambda s, x: s.b(torch.tanh(changed(s.a(x), "mul_", s.shift))).mean(1), 1),
    ],
)
def test_other_sizes_may_be_the_number_of_examples(forward: Any, times: int) -> None:
    model = layers(forward, position=made(1, times, 5), shift=made(times, 6))
    assert_same(model, F.cross_entropy, (torch.randn(4, times, 5), torch.arange(4) % 3), sizes=(4, 1))


def test_a_parameter_with_the_examples_in_two_places() -> None:
    model = layers(lambda s, x: plain(s, s.c(s.c(x.transpose(0, 1)).transpose(0, 1))).mean(1), c=nn.Linear(5, 5))
    batch = torch.randn(5, 4, 5), torch.arange(5) % 3
    assert_same(model, F.cross_entropy, batch, sizes=(5, 4, 3, 2))


VECTORS = [
    lambda s, x: s.b(F.relu_(s.a(x))),
    lambda s, x: s.b(part_doubled(s.a(x), 2.0)),  # a view of what was tapped
    lambda s, x: s.b(changed_of_two_names(torch.tanh(s.a(x)) * 1.0, "mul_", s.scale)),
    lambda s, x: s.b(F.linear(x, part_doubled(s.a.weight.clone().T, s.scale[:5, None]).T)),
    lambda s, x: plain(s, x) + F.linear(s.a(x).detach(), s.b.weight.detach()) + (x @ s.a.weight.data.T)[:, :3],
    lambda s, x: s.b(torch.tanh(s.a.weight @ x.T).T),
    lambda s, x: plain(s, x @ s.square.T + x @ s.square + x @ s.square.transpose(0, 0)),
    lambda s, x: plain(s, x @ s.square[:2].T @ s.square[:2] + F.linear(x, s.square.chunk(2)[0]).sum(1, keepdim=True)),
    lambda s, x: plain(s, F.linear(x, s.hyper(s.scale).view(5, 5))),
    lambda s, x: plain(s, torch.bmm(s.per(x).view(-1, 5, 5), x.unsqueeze(-1)).squeeze(-1)),
    lambda s, x: plain(s, torch.where(x[:, :1] > 0, x, s.square[0])) * (x[:, :1] > 0),  # not used by all examples
    lambda s, x: s.b(checkpoint(lambda z: torch.tanh(s.a(z)), s.per(x)[:, :5], use_reentrant=True)),
    lambda s, x: s.b(checkpoint(lambda z: torch.tanh(F.linear(z, s.a.weight * s.a.weight)), x, use_reentrant=False)),
    lambda s, x: plain(s, x) * F.mse_loss(s.a.weight, torch.zeros(6, 5)),
    lambda s, x: plain(s, x) + torch.zeros_like(s.b.bias) + s.b.bias.new_zeros(len(x), 3),
    lambda s, x: plain(s, x[:, [1, 0, 2, 3, 4]]) - plain(s, x),
    # Chosen or ordered within an example.
    lambda s, x: s.b(torch.tanh(s.a(x.sort(dim=-1)[0]))),
    lambda s, x: s.b(torch.tanh(s.a(x)).repeat_interleave(2, 0).view(len(x), 2, 6)[:, 0]),
    lambda s, x: s.b(torch.where(x[:, :1] > 0, s.a(x), 0)),
    lambda s, x: s.b(s.a(written(x.clone(), x > 1, 0.5))),
    lambda s, x: s.b(written(s.a(x), x[:, 0] > 0, 0.5)),
    lambda s, x: s.b(written(s.a(x).T.clone(), (s.a(x) > 0).T, 0.5).T),
    lambda s, x: s.b(written(s.a(x).T.clone(), torch.arange(6) % 2 == 0, 0.5).T),
    # Two steps that keep the order of numbers, one of which changes the sizes.
    lambda s, x: x @ s.column.squeeze(1).view(3, 5).t().contiguous(),
    lambda s, x: x @ s.boxed.squeeze(0).reshape(5, 3),
    lambda s, x: plain(s, x) * s.number.squeeze(-1),
]


@pytest.mark.parametrize("forward", VECTORS)
def test_vectors(forward: Any) -> None:
    model = layers(forward, scale=made(6), square=made(5, 5), hyper=nn.Linear(6, 25), per=nn.Linear(5, 25))
    batch = torch.randn(4, 5), torch.arange(4) % 3
    model.column, model.boxed, model.number = made(15, 1), made(1, 5, 1, 3), made()
    assert_same(model, F.cross_entropy, batch)


SEQUENCES = [
    lambda s, x: s.b(torch.tanh(s.a(x)).mean(1) - torch.tanh(s.a(x[:, :2])).mean(1)),
    lambda s, x: s.b(
        s.a(x.reshape(-1, 5)).view(len(x), -1, 6).mean(1) - s.a(x[:, :2].reshape(-1, 5)).view(-1, 2, 6)[:, 0]
    ),
    lambda s, x: plain(s, torch.cat([s.token.expand(len(x), -1, -1), x], 1)).mean(1),
    lambda s, x: plain(s, torch.softmax(s.queries @ x.transpose(1, 2), -1) @ x).mean(1),
    lambda s, x: s.b(torch.tanh(torch.einsum("btd,od->bto", x, s.a.weight)).mean(1)),
    lambda s, x: plain(s, x + s.table(torch.arange(x.shape[1]).expand(1, -1)) * 2).mean(1),
    lambda s, x: s.b(((F.elu(s.a(x)) + 1).transpose(1, 2) @ x @ s.square).transpose(1, 2)).mean(
        1
    ),  # a view whose memory lies otherwise
    lambda s, x: plain(s, torch.linalg.inv(x.transpose(1, 2) @ x + s.square @ s.square.T + MASK)).mean(1),
    lambda s, x: plain(s, x + torch.cdist(x, x).mean(2, keepdim=True)).mean(1),
    lambda s, x: plain(s, x * torch.zeros_like(MASK[:3]).masked_fill_(MASK[:3] > 0, 2.0)).mean(1),
    lambda s, x: s.b(F.max_unpool2d(*F.max_pool2d(s.a(x)[:, :2], 2, return_indices=True), 2).mean(1)).repeat(1, 3),
]
MASK = torch.eye(5)


@pytest.mark.parametrize("forward", SEQUENCES)
def test_sequences(forward: Any) -> None:
    more = {"token": made(1, 1, 5), "queries": made(2, 5), "table": nn.Embedding(9, 5, padding_idx=0)}
    model = layers(forward, **more, square=made(5, 5))
    assert_same(model, F.cross_entropy, (torch.randn(4, 3, 5), torch.arange(4) % 3))


class Plain(nn.Module):
    """For torch.compile, which must see the code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x)


def test_a_parameter_that_is_used_many_times() -> None:
    """A loop of Python over 520 steps: functions of Python may not call each other as often."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(520):
            h = h + s.scale
        return h

    assert_same(layers(forward, scale=made(5)), F.cross_entropy, (torch.randn(2, 5), torch.arange(2)), sizes=(2,))


def test_compiled_models() -> None:
    batch = torch.randn(4, 5), torch.arange(4) % 3
    assert_same(torch.compile(Plain(), backend="eager"), F.cross_entropy, batch)
    model = Plain()
    model.compile(backend="eager")
    model.a.compile(backend="eager")
    assert_same(model, F.cross_entropy, batch)


def test_autocast_and_small_floats() -> None:
    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = torch.sigmoid(s.norm(s.a(x) * s.scale)) ** s.scale.sigmoid()
            return s.b(h) + torch.tensordot(h, s.form, 1)

    model = layers(forward, form=made(6, 3), norm=nn.LayerNorm(6), scale=made(6))
    assert_same(model, F.cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3), tolerance=5e-2)
    small = layers(lambda s, x: plain(s, x * s.scale).float(), scale=made(5)).bfloat16()
    assert_same(small, F.cross_entropy, (torch.randn(4, 5).bfloat16(), torch.arange(4) % 3), tolerance=5e-2)


def test_tied_and_unused_parameters_and_no_examples() -> None:
    model = layers(lambda s, x: s.b(torch.tanh(s.d(torch.tanh(s.c(x))))), c=nn.Linear(5, 5), d=nn.Linear(5, 6))
    model.a.weight = model.d.weight
    model.c.weight = nn.Parameter(model.c.weight.detach()[:, :5])
    batch = torch.randn(4, 5), torch.arange(4) % 3
    assert_same(model, F.cross_entropy, batch)
    gradient = proved(model, F.cross_entropy, batch)
    none = rows(gradient, tuple(t[:0] for t in batch))
    assert [tuple(row.shape) for row in none] == [(0, p.numel()) for p in gradient.values.parameters()]


def test_frozen_parts_cost_nothing() -> None:
    model, batch = layers(plain), (torch.randn(4, 5), torch.arange(4) % 3)
    whole = proved(model, F.cross_entropy, batch).prove(batch).operations
    model.a.requires_grad_(False)
    assert proved(model, F.cross_entropy, batch).prove(batch).operations < whole
    assert_same(model, F.cross_entropy, batch)


def test_checkpoints_at_another_point() -> None:
    """What parameters make inside a checkpoint is of the point, not of the model's own values."""

    def inside(s: Any, z: torch.Tensor) -> torch.Tensor:
        weight = s.a.weight * s.a.weight
        return F.linear(F.linear(z, weight).sin(), weight.T.sin())

    for reentrant in (False, True):
        model = layers(lambda s, x: plain(s, checkpoint(inside, s, s.c(x), use_reentrant=reentrant)), c=nn.Linear(5, 5))  # noqa: B023
        batch = torch.randn(4, 5), torch.arange(4) % 3
        gradient = proved(model, F.cross_entropy, batch)
        found = rows(gradient, batch, [2 * value for value in gradient.values.parameters()])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        for row, right in zip(found, alone(model, F.cross_entropy, batch), strict=True):
            torch.testing.assert_close(row, right, rtol=1e-4, atol=1e-6)


class Product(torch.autograd.Function):
    """A product with a backward pass of its own."""

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


def energy(s: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = plain(s, x)
    (force,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out + force[:, :3]


HIDDEN = [
    lambda s, x: s.b(torch.tanh(Product.apply(x, s.a.weight))),
    lambda s, x: s.b(torch.tanh(Product.apply(x, s.a.weight * 2))),
    lambda s, x: s.b(torch.tanh(torch.vmap(lambda z: F.linear(z, s.a.weight))(x))),
    lambda s, x: plain(s, written(x.clone(), (slice(None), 0), s.b.bias[0])),
    differentiates_itself,
    energy,
    used_and_changed,
]


@pytest.mark.parametrize("forward", HIDDEN)
def test_what_torchs_functions_do_not_show(forward: Any) -> None:
    assert_same(layers(forward), F.cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))


FAR = 50  # no made-up entry is beyond


def labeled(s: Any, x: torch.Tensor) -> torch.Tensor:
    """Half of the rows twice, where as many are left out."""
    places = (torch.cat([x, x], 1).view(-1, 5)[:, 0] < FAR).nonzero()[:, 0]
    return s.b(torch.tanh(s.a(x[places // 2]))).view(len(x), -1, 3).sum(1)


OTHER_MASK = "by a mask that is not their own|uses the examples' places in the batch"
REFUSED = [
    (lambda s, x: plain(s, x) + torch.einsum("bd,od->o", x, s.a.weight)[:3], "combines a sum over the examples"),
    (lambda s, x: plain(s, torch.cat([x, s.a.weight[:1]]))[:-1], "cat joins or leaves out examples"),
    (lambda s, x: torch.cat([plain(s, row[None]) for row in x]), "unbind takes the examples apart"),
    (lambda s, x: plain(s, x) * torch.tensor(x.shape)[0], "uses the number of examples"),
    (lambda s, x: plain(s, x if len(x) % 2 else x - x.mean(0)), "uses the number of examples"),
    (lambda s, x: s.square.gather(0, x[:, :3].long()) + plain(s, x), "gather of values that all examples share"),
    # Rows that values choose, though made-up values choose all.
    (lambda s, x: plain(s, x[x[:, 0].argsort()] if (x > FAR).any() else x), ""),
    (lambda s, x: s.b(torch.zeros(len(x), 6).masked_scatter(x[:, :1] < FAR, s.a(x))), ""),
    (lambda s, x: s.b(written(torch.zeros(len(x), 6), x[:, 0] < FAR, s.a(x))), ""),
    (labeled, ""),
    (lambda s, x: s.b(written(s.a(x), torch.arange(len(x)) == 0, 0.5)), OTHER_MASK),
    (lambda s, x: s.b(written(s.a(x).T.clone(), (x > 0).sum(0)[[0, 1, 2, 3, 4, 4]] > 1, 0.5).T), OTHER_MASK),
]


@pytest.mark.parametrize(("forward", "reason"), REFUSED)
def test_what_is_refused(forward: Any, reason: str) -> None:
    with pytest.raises(NotProved, match=rf"({reason}).*line \d+"):
        program(layers(forward, square=made(5, 5)), F.cross_entropy, (torch.randn(4, 5), torch.arange(4) % 3))


def test_draws_in_place_are_draws_for_each_example() -> None:
    draws = {
        "uniform_": lambda h: torch.empty(h.shape).uniform_(),
        "normal_": lambda h: torch.zeros_like(h).normal_(),
        "bernoulli_": lambda h: torch.empty_like(h).bernoulli_(0.5),
        "exponential_": lambda h: h.new_empty(h.shape).exponential_(),
    }
    batch = torch.randn(4, 5), torch.arange(4) % 3
    for draw in draws.values():
        model = layers(lambda s, x, draw=draw: s.b(torch.tanh(s.a(x)) * draw(s.a(x))))
        gradient = proved(model, F.cross_entropy, batch)
        torch.manual_seed(3)
        found = torch.cat([block.rows() for block in blocks(gradient, batch)], 1)
        torch.manual_seed(3)
        wanted = torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), model.parameters())
        torch.testing.assert_close(found.sum(0), torch.cat([g.flatten() for g in wanted]))


def test_constants_tell_models_apart_and_are_not_written_to() -> None:
    class Kept(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.kept = nn.Linear(5, 3), torch.full((3,), value)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.kept

    class Written(Kept):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(x)
            self.kept.mul_(0.9).add_(h.detach().mean(0))
            return h

    batch = torch.randn(4, 5), torch.arange(4) % 3
    one, same, other = (proved(Kept(value), F.cross_entropy, batch) for value in (1.0, 1.0, 2.0))
    assert one.digest() == same.digest() != other.digest()
    with pytest.raises(NotProved, match="writes to a tensor that is kept between calls"):
        proved(Written(1.0), F.cross_entropy, batch)


SCALE = 1.0


def test_equal_models_share_a_graph_whatever_their_code_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes, class attributes, properties, globals, closures: what is computed decides, and not how."""
    weight = {0: 1.0}

    class Settings:
        width = 7

        def __init__(self, nested: float) -> None:
            self.deep = {"inner": [{"scale": nested}]}

        @property
        def scale(self) -> float:
            return self.width * SCALE

    class Net(nn.Module):
        factor = 1.0

        def __init__(self, nested: float = 2.0, unused: str = "") -> None:
            super().__init__()
            self.settings, self.unused = Settings(nested), unused
            self.one, self.two, self.scale = nn.Linear(5, 7), nn.Linear(7, 3), nn.Parameter(torch.ones(7))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            factor = self.factor * self.settings.scale * self.settings.deep["inner"][0]["scale"]
            return self.two(self.one(inputs) * self.scale) * factor

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return weight[0] * torch.nn.functional.cross_entropy(output, targets)

    def program(net: nn.Module | None = None) -> Any:
        return proved(net or Net(), loss, batch).prove(batch)

    batch = torch.randn(4, 5), torch.arange(4) % 3
    first = program()
    assert program() is first
    assert program(Net(unused="other")) is first
    others = [program(Net(3.0))]
    changes = (Net, "factor", 5.0), (Settings, "width", 11), (weight, 0, 13.0), (globals(), "SCALE", 17.0)
    for owner, name, value in changes:
        with monkeypatch.context() as patch:
            (patch.setattr if isinstance(owner, type) else patch.setitem)(owner, name, value)
            others.append(program())
    apart = Net()
    apart.scale.data = torch.ones(14)[::2]  # a graph's parameters lie as in the capture
    assert len({first, *others, program(apart)}) == 7


def test_a_graph_with_a_tensor_of_the_codes_own_or_with_shards_is_no_other_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, two = (torch.randn(4, 5), torch.arange(4) % 3), torch.full((3,), 2.0)

    def program(forward: Any) -> Any:
        return proved(layers(forward), F.cross_entropy, batch).prove(batch)

    def computed(s: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(s, x) * torch.full((3,), 2.0)

    def kept(s: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(s, x) * two

    whole = program(computed)
    assert program(computed) is whole
    assert program(kept) is not whole
    assert program(kept) is not program(kept)
    monkeypatch.setattr(Values, "gathered", lambda self, captured: lambda graph, places: None)
    assert program(computed) is not whole


@dataclass(slots=True)
class Boxed:
    x: torch.Tensor


def test_a_batch_is_known_by_its_shapes_whatever_its_class() -> None:
    known = structure(Boxed(torch.zeros(4, 2)))
    assert known == structure(Boxed(torch.ones(4, 2)))
    assert known != structure(Boxed(torch.zeros(4, 7)))


SHAPES_ALIKE = [
    folded_by_time,
    lambda s, x: s.b(torch.tanh(s.a(torch.cat([x[:, 0], x[:, 1]])))).view(2, len(x), 3).sum(0),
    lambda s, x: plain(s, x[(order := x[:, 0, 0].argsort())])[order.argsort()].mean(1),
    lambda s, x: plain(s, x - x.mean(0)).mean(1),
    lambda s, x: plain(s, x).mean(1) + s.a(x[0, 0])[:3],
]


@pytest.mark.parametrize("forward", SHAPES_ALIKE)
def test_what_shapes_cannot_tell(forward: Any) -> None:
    """Rows in another order, and examples that mix."""
    model = layers(forward)
    gradient = PerExampleGradient(model, F.cross_entropy)
    batch = torch.randn(4, 3, 5), torch.arange(4) % 3
    try:
        try_out(gradient, batch)
    except ArgumentError:  # a model that mixes examples is refused
        return
    # Rows in the order of time are in the order of the examples for the proof, which follows where they lie.
    assert (gradient.way == "pairs") == (forward is folded_by_time)
    blocks = gradient(gradient.parameters(), batch)
    for block, right in zip(blocks, alone(model, F.cross_entropy, batch), strict=True):
        torch.testing.assert_close(block.rows().double(), right, rtol=1e-4, atol=1e-6)


def first_of_many(s: Any, x: torch.Tensor) -> torch.Tensor:
    """As adapters that learn a prompt look it up."""
    found = s.table(torch.arange(3).unsqueeze(0).expand(len(x), -1)[:1])
    return plain(s, x + found.repeat(len(x), 1, 1).sum(1))


def test_the_first_of_rows_that_are_all_the_same_belongs_to_no_example() -> None:
    batch = torch.randn(4, 5), torch.arange(4) % 3
    assert_same(layers(first_of_many, table=nn.Embedding(3, 5)), F.cross_entropy, batch)
    for forward in (
        lambda s, x: plain(s, x + x[:1]),
        lambda s, x: plain(s, x + x.unsqueeze(1).expand(-1, 2, -1)[:1].sum(1)),
        lambda s, x: plain(s, x + torch.rand_like(x)[:1]),
    ):
        with pytest.raises(NotProved, match="slice takes the examples apart"):
            program(layers(forward), F.cross_entropy, batch)


# ------------------------------------------------------------------------------------------------------------ losses


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    kind: str = "kept"


FORMS = [
    (lambda z: {"z": z, "k": 3}, lambda out: out["z"]),
    (lambda z: (z, [z * 2]), lambda out: out[0] + out[1][0]),
    (Output, lambda out: out.logits * len(out.kind)),
    (lambda z: z.mT.unsqueeze(0), lambda out: out.squeeze(0).mT),  # the examples last
    (lambda z: (z, z.mean(), z.detach().mean()), lambda out: out[0]),  # numbers that nobody uses
]


@pytest.mark.parametrize(("targets", "loss"), [
    ((Boxed(torch.arange(4) % 3),), lambda out, y: F.cross_entropy(out, y.x)),
    ((torch.arange(4) % 3, None), lambda out, y, nothing: F.cross_entropy(out, y)),
])  # fmt: skip
def test_forms_of_targets(targets: Any, loss: Any) -> None:
    assert_same(layers(plain), loss, (torch.randn(4, 5), *targets))


def test_a_parameter_without_numbers_one_by_one() -> None:
    model = layers(lambda s, x: plain(s, x) + s.none.sum(), none=nn.Parameter(torch.empty(0)))
    try_out(PerExampleGradient(model, F.cross_entropy), (torch.randn(4, 5), torch.arange(4) % 3), way="one-by-one")


@pytest.mark.parametrize(("form", "logits"), FORMS)
def test_forms_of_output(form: Any, logits: Any) -> None:
    model = layers(lambda s, x: form(plain(s, x)))
    batch = torch.randn(4, 5), torch.arange(4) % 3
    assert_same(model, lambda out, y: F.cross_entropy(logits(out), y), batch)


def test_rows_of_an_example_in_the_output() -> None:
    """A language model may return (examples times tokens, words)."""
    model = layers(lambda s, x: plain(s, x).view(-1, 3))
    for times in (1, 4):
        batch = torch.randn(4, times, 5), torch.randint(0, 3, (4, times))
        assert_same(model, lambda out, y: F.cross_entropy(out, y.flatten()), batch, sizes=(4, 2, 1))


def test_losses_see_an_example_alone() -> None:
    """As many tokens as examples: the loss's own calls are never taken for the model's."""
    model = layers(plain)
    for count in (2, 4):
        batch = torch.randn(4, count, 5), torch.randint(0, 3, (4, count))

        def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(out.view(-1, 3), y.view(-1)) + F.mse_loss(out.mT, torch.ones_like(out.mT))

        assert_same(model, loss, batch, sizes=(4, 2, 1))


INSIDE = [
    lambda z, y: F.cross_entropy(z.view(-1, 3), y.view(-1), ignore_index=2),
    lambda z, y: F.cross_entropy(z.view(-1, 3), y.view(-1), weight=torch.tensor([1.0, 2.0, 3.0]), reduction="sum"),
    lambda z, y: F.cross_entropy(z.mT, y, torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1),
    lambda z, y: F.mse_loss(z.squeeze(), F.one_hot(y, 3).float().squeeze()) * 2,
    lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 3).float(), weight=1.0 + y.unsqueeze(-1)),
    lambda z, y: F.mse_loss(z, F.one_hot(y, 3).float(), None, None, "none").mean((1, 2)),
    lambda z, y: F.nll_loss(z.log_softmax(-1).mT, y, reduction="sum") + F.mse_loss(torch.ones(12), torch.zeros(12)),
    lambda z, y: F.binary_cross_entropy_with_logits(
        z, (y > 0).float().unsqueeze(-1).expand_as(z), pos_weight=torch.ones(3)
    ),
    lambda z, y: F.kl_div(z.log_softmax(-1), F.one_hot(y, 3).float(), reduction="batchmean"),
]


@pytest.mark.parametrize(("inside", "times"), pairs(INSIDE, [2, 3], 2))
def test_losses_that_a_model_computes(inside: Any, times: int) -> None:
    def forward(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return inside(plain(s, x), y), y

    batch = {"x": torch.randn(3, times, 5), "y": torch.randint(0, 2, (3, times))}
    assert_same(layers(forward), lambda out: out[0].sum(), batch, sizes=(3, 2))


LOSSES_REFUSED = [
    (lambda s, x: (plain(s, x), plain(s, x).mean()), lambda out, y: F.cross_entropy(out[0], y) + out[1], Mixes, "mean"),
    (lambda s, x: plain(s, x).mean(), lambda out, y: out, NotCaptured, "no dimension of examples"),
    (lambda s, x: (z := plain(s, x)) @ z.T, lambda out, y: out.sum(), NotCaptured, "each pair of examples"),
    (lambda s, x: F.mse_loss(plain(s, x).T, x.T[:3]), lambda out, y: out, NotProved, "no dimension of examples"),
]


@pytest.mark.parametrize(("forward", "loss", "kind", "reason"), LOSSES_REFUSED)
def test_losses_of_all_examples_at_once_are_refused(forward: Any, loss: Any, kind: Any, reason: str) -> None:
    with pytest.raises(kind, match=reason):
        program(layers(forward), loss, (torch.randn(4, 5), torch.arange(4) % 3))


def test_losses_of_distillation() -> None:
    batch = torch.randn(4, 5), torch.randn(4, 3).softmax(1)
    for kind, log in (("batchmean", False), ("sum", True), ("none", False)):

        def loss(out: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return F.kl_div(out.log_softmax(1), t, reduction=kind, log_target=log).sum()  # noqa: B023

        assert_same(layers(plain), loss, batch)


def test_losses_that_take_parameters() -> None:
    model = layers(plain)
    batch = torch.randn(4, 5), torch.arange(4) % 3
    for loss in (
        lambda out, y: F.cross_entropy(out, y) + sum(p.square().sum() for p in model.parameters()),
        lambda out, y: F.cross_entropy(F.linear(out, model.b.weight[:, :3]), y),
    ):
        assert_same(model, loss, batch)


def test_outputs_of_another_structure_are_another_graph() -> None:
    model = layers(lambda s, x: (plain(s, x), *[x] * s.more), more=0)
    batch = torch.randn(4, 5), torch.arange(4) % 3
    gradient = proved(model, lambda out, y: F.cross_entropy(out[0], y) + sum(part.sum() for part in out[1:]), batch)
    model.more = 1
    gradient.current(gradient.values.parameters(), batch, real=False)
    assert len(gradient.programs) == 2
