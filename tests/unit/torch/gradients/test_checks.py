"""What mixes examples is noticed before the first step, by its line; what has no proof otherwise is taken alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpcore.torch
from dpcore.errors import ArgumentError, SpeedWarning
from dpcore.torch.gradients.per_example import PerExampleGradient, try_out
from tests.unit.torch.models import Called
from tests.unit.torch_runs import DATA, sgd, start

EXAMPLE = (torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64))


def way_of(model: nn.Module, way: str = "auto", example: Any = EXAMPLE) -> PerExampleGradient:
    gradient = PerExampleGradient(model, F.cross_entropy)
    try_out(gradient, example, way=way)
    return gradient


class Mixing(nn.Linear):
    """Subtracts the mean over the batch, always or only where gradients are enabled."""

    def __init__(self, always: bool) -> None:
        super().__init__(5, 3)
        self.always = always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out - out.mean(0) if self.always or torch.is_grad_enabled() else out


@pytest.mark.parametrize(("always", "way"), [(True, "auto"), (False, "pairs")])
def test_a_model_that_mixes_is_refused_by_its_line(always: bool, way: str) -> None:
    where = r"\(module '0' \(Mixing\), test_checks\.py, line \d+, in forward\)"
    words = f"model=Sequential: mean runs over the examples {where}.*gradients='one-by-one'"
    with pytest.raises(ArgumentError, match=words):
        way_of(nn.Sequential(Mixing(always)), way)


def test_a_model_that_mixes_sees_batches_of_one_where_that_is_asked_for() -> None:
    center = Called(lambda m, x: x - x.mean(0) / 2)  # leaves nothing of an example that is alone but its half
    model = nn.Sequential(nn.Linear(5, 5), center, nn.Linear(5, 3))
    gradient = way_of(model, "one-by-one")
    assert gradient.way == "one-by-one"
    x, y = torch.randn(4, 5), torch.arange(4) % 3
    blocks = [block.rows() for block in gradient(gradient.parameters(), (x, y))]
    for i in range(4):
        own = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        for block, wanted in zip(blocks, own, strict=True):
            torch.testing.assert_close(block[i], wanted.flatten())


class MixesGradients(torch.autograd.Function):
    """The identity forward; backward, every example gets the mean over the batch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.mean(0, keepdim=True).expand_as(gradient)


class Leaks(torch.autograd.Function):
    """Forward the identity; backward it adds a trace of the whole batch's activations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.trace = 1e-9 * x.sum()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient + ctx.trace


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (MixesGradients, r"mean runs over the examples \(test_checks\.py, line \d+, in backward\)"),
        (Leaks, "combines a sum over the examples with the examples"),
    ],
)
def test_a_trace_of_other_examples_in_a_backward_pass_is_found(function: Any, words: str) -> None:
    model = Called(lambda m, x: function.apply(m.body(x)), body=nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
    with pytest.raises(ArgumentError, match=words):
        way_of(model)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(4, 5), nn.Linear(5, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(tokens).mean(1))


def test_a_gradient_that_a_global_of_the_model_names_is_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = PerExampleGradient(Tokens(), F.cross_entropy)
    monkeypatch.setitem(Tokens.forward.__globals__, "table", gradient)  # as the attribute that forward reads
    try_out(gradient, (torch.zeros(1, 7, dtype=torch.int64), EXAMPLE[1]))
    assert gradient.way == "pairs"
    assert not gradient.reasons


def experts(s: Any, x: torch.Tensor) -> torch.Tensor:
    """Each row is taken by `a` or `c`, and all made-up ones by `a`: their order is then the examples'."""
    far = x[:, 0] > 50  # no made-up entry is beyond
    order, count = far.long().sort(stable=True)[1], int((~far).sum())
    mixed = torch.cat([s.a(x[order][:count]), s.c(x[order][count:])])
    return torch.zeros_like(mixed).index_copy(0, order, mixed)


UNPROVED: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "a value": (lambda s, x: -s.a(x) if x[0, 0] > 0 else s.a(x), "a value decides"),
    "rows that values order": (experts, "a value decides"),
    "no rule": (
        lambda s, x: torch.linalg.solve(torch.eye(3) + s.a(x).unsqueeze(1) ** 2, s.a(x)),
        "_linalg_solve_ex has no rule",
    ),
    "a sparse gradient": (
        lambda s, x: s.c(F.embedding((x > 0).long(), s.a.weight, sparse=True).sum(1)),
        "_sparse_coo_tensor_with_dims_and_tensors has no rule",
    ),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_what_has_no_proof_is_taken_one_by_one(name: str) -> None:
    forward, words = UNPROVED[name]
    parts = {"a": nn.Linear(5, 3), "c": nn.Linear(5, 3)}
    gradient = way_of(Called(forward, **parts))
    assert gradient.way == "one-by-one"
    assert list(gradient.reasons) == ["pairs"]
    assert words in gradient.reasons["pairs"]
    if name == "no rule":
        with pytest.raises(ArgumentError, match=words):
            way_of(Called(forward, **parts), "pairs")


@pytest.mark.filterwarnings("ignore:.*far from 1 in size:dpcore.errors.TrainingWarning")
def test_a_batch_that_leads_elsewhere_is_taken_one_by_one() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if (x > 50).any():  # what no made-up example does
            return torch.stack([(m.rare if row.max() > 50 else m.usual)(row) for row in x])
        return m.usual(x)

    net = Called(forward, usual=nn.Linear(5, 3), rare=nn.Linear(5, 3))
    before = net.rare.weight.detach().clone()
    with pytest.warns(SpeedWarning, match=r"takes 'one-by-one'.*a value decides.*line \d+, in forward"):
        run = start(net, data=(DATA[0] + 100 * (torch.arange(30) % 2)[:, None], DATA[1]))
    run.step(next(iter(run.loader)))
    assert not torch.equal(net.rare.weight, before)


def test_a_third_tensor_under_the_default_loss_is_told() -> None:
    with pytest.raises(ArgumentError, match="data with 3 parts: the default loss, cross_entropy, takes an output"):
        dpcore.torch.make_private(nn.Linear(5, 3), (*DATA, torch.randn(30)), sgd(), steps=2)
