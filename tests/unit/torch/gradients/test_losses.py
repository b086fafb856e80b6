"""Losses of the examples of a batch: outputs of any form, and losses that a model computes itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dpcore.torch.gradients.errors import Mixes, NotCaptured, NotProved
from tests.unit.torch.gradients.one_by_one import Layers, assert_same, proved


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def plain(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.b(torch.tanh(s.a(x)))


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


@pytest.mark.parametrize(("form", "logits"), FORMS)
def test_forms_of_output(form: Any, logits: Any) -> None:
    model = Layers(lambda s, x: form(plain(s, x)))
    batch = torch.randn(4, 5), torch.arange(4) % 3
    assert_same(model, lambda out, y: F.cross_entropy(logits(out), y), batch)


def test_rows_of_an_example_in_the_output() -> None:
    """A language model may return (examples times tokens, words)."""
    model = Layers(lambda s, x: plain(s, x).view(-1, 3))
    for times in (1, 2, 3, 4):
        batch = torch.randn(4, times, 5), torch.randint(0, 3, (4, times))
        assert_same(model, lambda out, y: F.cross_entropy(out, y.flatten()), batch, sizes=(4, 2, 1))


def test_losses_see_an_example_alone() -> None:
    """As many tokens as examples: the loss's own calls are never taken for the model's."""
    model = Layers(plain)
    for count in (2, 3, 4):
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
]


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("times", [2, 3])
def test_losses_that_a_model_computes(inside: Any, times: int) -> None:
    def forward(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return inside(plain(s, x), y), y

    batch = {"x": torch.randn(3, times, 5), "y": torch.randint(0, 2, (3, times))}
    assert_same(Layers(forward), lambda out: out[0].sum(), batch, sizes=(3, 2))


REFUSED = [
    (lambda s, x: (plain(s, x), plain(s, x).mean()), lambda out, y: F.cross_entropy(out[0], y) + out[1], Mixes, "mean"),
    (lambda s, x: plain(s, x).mean(), lambda out, y: out, NotCaptured, "no dimension of examples"),
    (lambda s, x: (z := plain(s, x)) @ z.T, lambda out, y: out.sum(), NotCaptured, "each pair of examples"),
    (lambda s, x: F.mse_loss(plain(s, x).T, x.T[:3]), lambda out, y: out, NotProved, "no dimension of examples"),
]


@pytest.mark.parametrize(("forward", "loss", "kind", "reason"), REFUSED)
def test_losses_of_all_examples_at_once_are_refused(forward: Any, loss: Any, kind: Any, reason: str) -> None:
    with pytest.raises(kind, match=reason):
        proved(Layers(forward), loss, (torch.randn(4, 5), torch.arange(4) % 3))


def test_losses_that_take_parameters() -> None:
    model = Layers(plain)
    batch = torch.randn(4, 5), torch.arange(4) % 3
    for loss in (
        lambda out, y: F.cross_entropy(out, y) + sum(p.square().sum() for p in model.parameters()),
        lambda out, y: F.cross_entropy(F.linear(out, model.b.weight[:, :3]), y),
    ):
        assert_same(model, loss, batch)


def test_outputs_of_another_structure_are_another_graph() -> None:
    model = Layers(lambda s, x: (plain(s, x), *[x] * s.more), more=0)
    batch = torch.randn(4, 5), torch.arange(4) % 3
    gradient = proved(model, lambda out, y: F.cross_entropy(out[0], y) + sum(part.sum() for part in out[1:]), batch)
    model.more = 1
    gradient.current(gradient.values.parameters(), batch, real=False)
    assert len(gradient.programs) == 2
