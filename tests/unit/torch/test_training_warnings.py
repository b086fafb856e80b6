"""Remarks before and during a run: values that are not finite, unscaled inputs, targets, a model in eval mode."""

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpcore
from dpcore.errors import ArgumentError, TrainingWarning
from dpcore.torch.data import remarks as module
from dpcore.torch.data.data import Data
from dpcore.torch.data.remarks import remarks
from tests.unit.torch_runs import DATA, finish, model, sgd, start

CPU = torch.device("cpu")
X, Y = DATA


def told(*data: object, loss: object = F.cross_entropy) -> list[str]:
    return remarks(Data(data, CPU), loss)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("piece", [4, 1 << 22])
def test_one_value_that_is_not_finite_is_told_without_its_place(
    bad: float, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", piece)
    inputs = X.clone()
    inputs[17, 3] = bad
    (sentence,) = told(inputs, Y)
    assert sentence.startswith("data[0]: some values are not finite")
    assert not any(character.isdigit() for character in sentence.removeprefix("data[0]"))  # no place, no number
    assert told(inputs.bfloat16(), Y) == [sentence]
    (of_targets,) = told(X, inputs[:, 3], loss=F.mse_loss)
    assert of_targets.startswith("data[1]: some values are not finite")


def test_sound_data_are_not_remarked_on() -> None:
    assert not told(X, Y)
    assert not told(torch.full((4, 2), 3e38).double() / 1e38, Y[:4])
    assert not told(torch.arange(30)[:, None] + 500, Y)  # numbers of words
    assert not told(X.new_zeros(4, 0), Y[:4])
    assert not remarks(Data(Rows(X), CPU), F.cross_entropy)


class Clock:
    """The time by which the look at the data ends; only slow data sets let it pass, however busy the machine is."""

    seconds = 0.0


@pytest.fixture(autouse=True)
def _a_clock_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "seconds", 0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: Clock.seconds))


class Rows:
    """A data set that is read by index: which indices were read, and how long each takes."""

    def __init__(self, inputs: torch.Tensor, seconds: float = 0.0) -> None:
        self.inputs, self.seconds, self.read = inputs, seconds, list[int]()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        Clock.seconds += self.seconds
        if bool((self.inputs[index] == -1).all()):
            raise ValueError("no such file")
        return self.inputs[index], Y[index % len(Y)]


def test_examples_of_a_data_set_are_looked_at_as_tensors_are() -> None:
    rows = torch.ones(1000, 5)
    rows[999, 2] = math.nan
    (sentence,) = remarks(Data(Rows(rows), CPU))
    assert [sentence] == told(rows[-3:], Y[:3])
    (sentence,) = remarks(Data(Rows(255 * torch.ones(1000, 5)), CPU))
    assert "data[0]: its values are far from 1 in size" in sentence
    targets = [(X[k], torch.tensor([0.5, 1.5])) for k in range(9)]
    assert "are the probabilities of classes" in remarks(Data(targets, CPU), F.cross_entropy)[0]
    assert not remarks(Data(targets, CPU), F.mse_loss)


def test_an_example_that_cannot_be_read_ends_the_look_without_a_word() -> None:
    rows = torch.ones(10, 5)
    rows[4] = -1.0
    rows[7] = math.nan
    assert not remarks(Data(Rows(rows), CPU))


@pytest.mark.parametrize("factor", [255.0, 1e30, 1e200])
def test_inputs_far_from_one_are_remarked_on_and_targets_are_not(factor: float) -> None:
    raw = X.double() * factor
    (sentence,) = told(raw, Y)
    assert "data[0]: its values are far from 1 in size" in sentence
    assert told({"a": raw}, Y)[0].startswith("data[0]['a']: ")
    assert not told(X, raw[:, 0], loss=F.mse_loss)


def test_the_size_is_that_of_all_values_not_of_the_largest() -> None:
    """So that one example hardly moves it."""
    inputs = torch.ones(30_000, 2)
    inputs[7] = 1000.0
    assert not told(inputs, torch.zeros(30_000, dtype=torch.int64))


def test_targets_of_floats_that_are_no_probabilities_are_remarked_on() -> None:
    soft = torch.softmax(torch.arange(90.0).reshape(30, 3), dim=1)
    assert not told(X, soft)
    assert "are the probabilities of classes" in told(X, soft * 2)[0]
    assert "are the probabilities of classes" in told(X, soft - torch.tensor([1.0, -1.0, 0.0]))[0]
    assert not told(X, soft * 2, loss=F.mse_loss)


class Noisy(Rows):
    """A data set that augments, by a generator of its own."""

    generator = np.random.default_rng(3)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs + float(self.generator.normal()), target


@pytest.mark.parametrize("kind", [lambda inputs: (inputs, Y), Rows, Noisy])
def test_a_remark_changes_nothing_of_the_run(kind: Callable[[torch.Tensor], Any]) -> None:
    """Steps, noise and statement are those of the same run without the remark, and the look at the data."""
    inputs = X.clone()
    inputs[3] = math.nan
    with pytest.warns(TrainingWarning, match="not finite"):
        told_of = start(model(), data=kind(inputs), stop=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["dpcore.torch.make_private"], "remarks", lambda *_: [])
        quiet = start(model(), data=kind(inputs), stop=3)
    for one, other in zip(told_of.model.parameters(), quiet.model.parameters(), strict=True):
        assert torch.equal(one, other)
    statements = [run.statement(1e-5).to_dict() for run in (told_of, quiet)]
    assert statements[0] == statements[1]
    assert "finite" not in str(statements[0]["caveats"])


class Droppy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))


def test_dropout_that_is_off_is_told_once() -> None:
    with pytest.warns(TrainingWarning, match=r"in eval mode, so its dropout \(module '1'\) is off") as caught:
        start(Droppy().eval(), stop=3)
    assert len(caught) == 1
    assert caught[0].filename.endswith("torch_runs.py")  # where step was called


def test_modes_that_drop_as_they_should_are_not_remarked_on() -> None:
    part = Droppy()
    part[1].eval()  # on purpose: the model as a whole trains
    for net in (Droppy(), part, model().eval(), nn.Sequential(nn.Dropout(0.0), nn.Linear(5, 3)).eval()):
        start(net, stop=2)


def test_minimize_says_that_it_diverged_and_nothing_else_does() -> None:
    sampler = dpcore.sampling.PoissonSampler(dataset_size=100, batch_size=10)
    method = dpcore.methods.dp_sgd(lr=1e38, noise_multiplier=1e3, momentum=0.9, base="momentum")
    with pytest.warns(TrainingWarning, match="minimize diverged: x is not finite") as caught:
        dpcore.minimize(
            lambda x, i: x - np.ones((len(i), 3), np.float32), np.zeros(3, np.float32), sampler, method, steps=40
        )
    assert [each.category for each in caught] == [TrainingWarning]


def test_a_learning_rate_beyond_the_dtype_is_refused_before_a_step() -> None:
    with pytest.raises(ArgumentError, match=r"lr=1e\+39: must be at most 3.403e\+38, the largest float32"):
        start(model(), sgd(lr=1e39))
    run = start(model())
    run.optimizer.param_groups[0]["lr"] = 1e39
    with pytest.raises(ArgumentError, match="the largest float32"):
        finish(run)
    assert run.steps_taken == 0
