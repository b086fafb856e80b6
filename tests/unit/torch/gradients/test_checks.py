"""What mixes examples is noticed before the first step, by its line; what has no proof otherwise is taken alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpcore
import dpcore.torch
from dpcore.errors import ArgumentError, SpeedWarning
from dpcore.torch.gradients.per_example import PerExampleGradient, try_out
from tests.unit.torch_runs import DATA, start

EXAMPLE = (torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64))


def way_of(model: nn.Module, loss: Any = F.cross_entropy, way: str = "auto") -> PerExampleGradient:
    gradient = PerExampleGradient(model, loss)
    try_out(gradient, EXAMPLE, way=way)
    return gradient


class Mixing(nn.Linear):
    """Subtracts the mean over the batch, always or only where gradients are enabled."""

    def __init__(self, always: bool) -> None:
        super().__init__(5, 3)
        self.always = always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out - out.mean(0) if self.always or torch.is_grad_enabled() else out


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("way", ["auto", "pairs"])
def test_a_model_that_mixes_is_refused_by_its_line(always: bool, way: str) -> None:
    where = r"\(module '0' \(Mixing\), test_checks\.py, line \d+, in forward\)"
    words = f"model=Sequential: mean runs over the examples {where}.*gradients='one-by-one'"
    with pytest.raises(ArgumentError, match=words):
        way_of(nn.Sequential(Mixing(always)), way=way)


def test_a_model_that_mixes_sees_batches_of_one_where_that_is_asked_for() -> None:
    gradient = way_of(nn.Sequential(nn.Linear(5, 5), Center(), nn.Linear(5, 3)), way="one-by-one")
    assert gradient.way == "one-by-one"
    batch = torch.randn(4, 5), torch.arange(4) % 3
    whole = [block.rows() for block in gradient(gradient.parameters(), batch)]
    first = [block.rows() for block in gradient(gradient.parameters(), tuple(t[:1] for t in batch))]
    for rows, row in zip(whole, first, strict=True):
        torch.testing.assert_close(rows[:1], row)


class Center(nn.Module):
    """Leaves nothing of an example that is alone but its half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0) / 2


class MixesGradients(torch.autograd.Function):
    """The identity forward; backward, every example gets the mean over the batch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.mean(0, keepdim=True).expand_as(gradient)


class Backward(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MixesGradients.apply(super().forward(x))


def test_a_model_that_mixes_in_its_backward_pass_alone_is_never_taken_in_batches() -> None:
    with pytest.raises(ArgumentError, match=r"mean runs over the examples \(test_checks\.py, line \d+, in backward\)"):
        way_of(Backward(nn.Linear(5, 3)))


class Hidden(torch.autograd.Function):
    """A product that torch's modes do not see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class Unseen(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Hidden.apply(x, self.weight) + self.bias


def test_a_function_of_the_users_own_is_followed() -> None:
    gradient = way_of(nn.Sequential(nn.Linear(5, 4), Unseen(4, 3)))
    assert gradient.way == "pairs"


class Leaks(torch.autograd.Function):
    """Forward the identity; backward it adds a trace of the whole batch's activations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.trace = 1e-9 * x.sum()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient + ctx.trace


class Leaking(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Leaks.apply(super().forward(x))


def test_a_trace_of_other_examples_in_a_backward_pass_is_found() -> None:
    with pytest.raises(ArgumentError, match="combines a sum over the examples with the examples"):
        way_of(Leaking(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))


class Tokens(nn.Module):
    """A table whose rows get a trace of what the whole batch looked up."""

    def __init__(self, trace: float) -> None:
        super().__init__()
        self.table, self.last, self.trace = nn.Embedding(4, 5), nn.Linear(5, 3), trace

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.table(tokens)
        return self.last((found + self.trace * found.mean(0) if self.trace else found).mean(1))


def test_a_trace_of_another_example_is_found_in_integers() -> None:
    with pytest.raises(ArgumentError, match="mean runs over the examples"):
        try_out(PerExampleGradient(Tokens(1e-5), F.cross_entropy), (torch.zeros(1, 7, dtype=torch.int64), EXAMPLE[1]))


def test_a_gradient_that_a_global_of_the_model_names_is_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = PerExampleGradient(Tokens(0.0), F.cross_entropy)
    monkeypatch.setitem(Tokens.forward.__globals__, "table", gradient)  # as the attribute that forward reads
    try_out(gradient, (torch.zeros(1, 7, dtype=torch.int64), EXAMPLE[1]))
    assert gradient.way == "pairs"
    assert not gradient.reasons


class Unproved(nn.Linear):
    """A value of an example decides, or an operation without a rule."""

    def __init__(self, by_python: bool) -> None:
        super().__init__(5, 3)
        self.by_python = by_python

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.by_python:
            return -out if x[0, 0] > 0 else out
        return torch.linalg.solve(torch.eye(3) + out.unsqueeze(1) ** 2, out)


@pytest.mark.parametrize("by_python", [False, True])
def test_what_has_no_proof_is_taken_one_by_one(by_python: bool) -> None:
    gradient = way_of(Unproved(by_python))
    assert gradient.way == "one-by-one"
    assert list(gradient.reasons) == ["pairs"]
    assert ("a value decides" if by_python else "_linalg_solve_ex has no rule") in gradient.reasons["pairs"]
    with pytest.raises(ArgumentError, match=r"a value decides|_linalg_solve_ex has no rule"):
        way_of(Unproved(by_python), way="pairs")


@pytest.mark.filterwarnings("ignore:.*far from 1 in size:dpcore.errors.TrainingWarning")
def test_a_batch_that_leads_elsewhere_is_taken_one_by_one() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.usual, self.rare = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x > 50).any():  # what no made-up example does
                return torch.stack([(self.rare if row.max() > 50 else self.usual)(row) for row in x])
            return self.usual(x)

    net = Branching()
    before = net.rare.weight.detach().clone()
    with pytest.warns(SpeedWarning, match=r"takes 'one-by-one'.*a value decides.*line \d+, in forward"):
        run = start(net, data=(DATA[0] + 100 * (torch.arange(30) % 2)[:, None], DATA[1]))
    run.step(next(iter(run.loader)))
    assert not torch.equal(net.rare.weight, before)


def test_labels_that_are_no_classes_are_refused_before_the_first_step_and_not_shown() -> None:
    net, method = nn.Linear(5, 3), dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=4)
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(ignore_index=7)):
        labels = torch.arange(12) % 3
        labels[5] = 7
        if loss is not F.cross_entropy:
            dpcore.torch.make_private(net, (torch.randn(12, 5), labels), method, steps=2, loss=loss)
            labels[5] = 8
        with pytest.raises(ArgumentError, match=r"labels: must lie in \[0, 3\)") as caught:
            dpcore.torch.make_private(net, (torch.randn(12, 5), labels), method, steps=2, loss=loss)
        assert "8" not in str(caught.value)


def test_a_third_tensor_under_the_default_loss_is_told() -> None:
    data = torch.randn(12, 5), torch.arange(12) % 3, torch.randn(12)
    method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=4)
    with pytest.raises(ArgumentError, match="data with 3 parts: the default loss, cross_entropy, takes an output"):
        dpcore.torch.make_private(nn.Linear(5, 3), data, method, steps=2)
