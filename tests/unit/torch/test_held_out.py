"""Metrics on held-out data, and early stopping."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dpcore.averaging import UniformAverage
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from dpcore.cli.reports.verify import ledger_findings
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.ledger import Ledger
from dpcore.statement.verify import holds, verify
from dpcore.torch import HeldOut
from tests.refused import refused
from tests.unit.torch_runs import DATA, finish, model, sgd, values
from tests.unit.torch_runs import start_one_by_one as start

HELD = DATA[0][:12].clone() + 0.01, DATA[1][:12].clone()


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == labels).float().mean()


@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader"])
def test_means_are_those_of_all_examples_and_only_released_quantities_are_logged(kind: str) -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))
    run = start(net, sgd(averaging=UniformAverage(start=0)))
    data = {"tensors": HELD, "dataset": TensorDataset(*HELD), "loader": DataLoader(TensorDataset(*HELD), 5)}[kind]
    metrics = {"accuracy": accuracy, "loss": F.cross_entropy}
    held_out = HeldOut(run, data, metrics, batch_size=5)
    finish(run, stop=3)
    net.train()
    net[0].eval()
    found = held_out.evaluate()
    assert [module.training for module in net] == [False, True, True]
    with run.averaged():
        net.eval()
        wanted = F.cross_entropy(net(HELD[0]), HELD[1]).item()
    assert found["loss"] == pytest.approx(wanted, rel=1e-6)
    told = {**found, "epsilon": run.epsilon(), "epsilon_planned": run.epsilon(planned=True), "learning_rate": 0.3}
    assert held_out.history == [{**told, "step": 3}]
    assert run.epsilon() < run.epsilon(planned=True)
    net.train()
    finish(run)
    assert run.epsilon() == run.epsilon(planned=True)


def test_stops_after_so_many_evaluations_without_a_better_value_and_keeps_the_best_state() -> None:
    run = start(model())
    found = iter([1.0, 3.0, 2.0, math.nan, 9.0])
    held_out = HeldOut(run, HELD, {"loss": lambda output, labels: next(found)}, patience=2, larger_is_better=True)
    states = []
    for batch in run.loader:
        run.step(batch)
        held_out.evaluate()
        states.append(values(run.model))
        if held_out.stop:
            break
        assert len(states) < 4
    assert held_out.stop
    assert len(states) == 4
    best = torch.cat([value.flatten() for value in (held_out.best_state or {}).values()])
    assert torch.equal(best, states[1])
    told = run.statement()
    total = run.plan.steps
    assert total > 4
    assert told.note.startswith(f"Results decided to stop after 4 of {total} planned steps, so epsilon counts all ")
    assert run.statement(note="Mine.").note == f"Mine. {told.note}"
    # No figure is of the steps taken: their number is a result.
    assert (told.steps_taken, told.steps_counted, told.event) == (4, total, run.plan.event.to_dict())
    assert told.best_epsilon == run.epsilon() == run.plan.epsilon(told.delta)
    assert held_out.history[-1]["epsilon"] == run.epsilon() > held_out.history[-2]["epsilon"]
    assert holds(verify(told.to_dict()))
    finish(run)  # goes on all the same: then both are one
    assert run.statement().note == ""
    run, found = start(model()), iter([3.0, 2.0, 1.0])
    held_out = HeldOut(run, HELD, {"loss": lambda output, labels: next(found)}, patience=1, larger_is_better=False)
    assert not any((held_out.evaluate(), held_out.stop)[1] for _ in range(3))


def test_a_ledger_gets_the_rest_back_and_agrees_with_the_statement(tmp_path: Path) -> None:
    file = tmp_path / "people.ledger"
    Ledger.create(file)
    run = start(model(), ledger=file)
    finish(run, stop=2)
    run.stopped_by_results = True
    run.close()
    told = run.statement()
    assert told.steps_counted == run.plan.steps > told.steps_taken == 2
    assert f"all {run.plan.steps} planned steps, after 2 of" in " ".join(told.text().split())
    assert told.ledger["total"]["epsilon_if_fixed_beforehand"] < told.best_epsilon  # of the two steps
    findings = {found.check: found for found in [*verify(told.to_dict()), *ledger_findings(told.to_dict(), file)]}
    assert holds(findings.values())
    assert findings["ledger: event"].words == "is that of the whole plan, of which the ledger has 2 steps"


def test_the_first_process_decides_which_state_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(model(), stop=1)
    held_out = HeldOut(run, HELD, {"accuracy": lambda *_: 0.5})
    held_out.evaluate()
    monkeypatch.setattr(run.engine.mechanism.peers, "same", lambda value: value + 0.1)  # the first process's metric
    held_out.best_state = None
    held_out.evaluate()
    assert held_out.best_state is not None


def test_a_saved_state_remembers_that_results_decided_to_stop() -> None:
    run, again = start(model(), stop=2), start(model())
    run.stopped_by_results = True
    again.optimizer.load_state_dict(run.optimizer.state_dict())
    assert again.stopped_by_results
    assert again.epsilon() == run.epsilon() == run.epsilon(planned=True)
    assert again.statement().steps_counted == run.plan.steps


BIG = torch.rand(40, 5), torch.arange(40) % 3
WHOLE = TensorDataset(*BIG)
PAIRS = list(zip(BIG[0], BIG[1].tolist(), strict=True))
ZERO = torch.tensor(0)


class Augmented(Subset[Any]):
    """A subset as many write it, for a transform of its own."""

    def __getitem__(self, index: Any) -> Any:
        inputs, label = super().__getitem__(index)
        return -inputs, label

    def __getitems__(self, indices: Any) -> Any:
        return [self[index] for index in indices]


SAME: dict[str, tuple[Any, Any]] = {
    "a subset of one's own": (Augmented(WHOLE, range(30)), Subset(WHOLE, [29])),
    "the data": (DATA, DATA),
    "of one array": ((BIG[0][:30], BIG[1][:30]), (BIG[0][29:], BIG[1][29:].clone())),
    "numpy": ((BIG[0].numpy(), BIG[1]), (BIG[0].numpy()[3:5], np.arange(2))),
    "common indices": (Subset(WHOLE, range(30)), Subset(WHOLE, [35, 29])),
    "the whole of a part": (Subset(WHOLE, range(30)), WHOLE),
    "a part of the whole": (WHOLE, Subset(WHOLE, [3])),
    "its loader": (WHOLE, DataLoader(WHOLE)),
    "indices in tensors": (Subset(WHOLE, list(torch.arange(30))), Subset(WHOLE, torch.arange(25, 35))),  # type: ignore[arg-type]
    "from the end": (Subset(WHOLE, range(30)), Subset(WHOLE, [-40])),
    "a part of a part": (Subset(Subset(WHOLE, range(5, 40)), range(30)), Subset(WHOLE, [34])),
    "in a row with others": (ConcatDataset([TensorDataset(*BIG)]), Subset(WHOLE, [0])),
    "rows of a subset": (Subset(WHOLE, range(30)), (BIG[0][3:5], BIG[1][3:5].clone())),
    "every second row": ((BIG[0][::2], BIG[1][::2]), (BIG[0][3:9], BIG[1][3:9])),
    "examples of lists": (PAIRS[:30], PAIRS[29:]),
}
APART = {
    "of one array": ((BIG[0][:30], BIG[1][:30]), (BIG[0][30:], BIG[1][30:])),
    "two subsets": (Subset(WHOLE, range(30)), Subset(WHOLE, range(30, 40))),
    "odd and even rows": ((BIG[0][::2], BIG[1][::2]), (BIG[0][1::2], BIG[1][1::2])),
    "two lists": (PAIRS[:30], PAIRS[30:]),
    "one value for all rows": ((BIG[0][:20], ZERO.expand(20)), (BIG[0][20:], ZERO.expand(20))),
}


@pytest.mark.parametrize("kind", SAME)
def test_training_data_are_refused(kind: str) -> None:
    trained, held = SAME[kind]
    run = start(model(), data=trained)
    refused(ArgumentError, "must not be trained on", HeldOut, run, held, {"a": accuracy})


@pytest.mark.parametrize("kind", APART)
def test_other_rows_of_the_same_array_are_not(kind: str) -> None:
    trained, held = APART[kind]
    run = start(model(), data=trained)
    assert 0 <= HeldOut(run, held, {"a": accuracy}).evaluate()["a"] <= 1


def test_what_else_is_refused() -> None:
    run = start(model())
    refused(ArgumentError, "delta=None", HeldOut, start(model(), target_delta=None), HELD, {"a": accuracy})
    refused(ArgumentError, "metrics={}", HeldOut, run, HELD, {})
    refused(ArgumentError, r"metrics\['epsilon'\]", HeldOut, run, HELD, {"epsilon": accuracy})
    refused(ArgumentTypeError, "a=1: must be a function", HeldOut, run, HELD, {"a": 1})
    refused(ArgumentError, "patience=0", HeldOut, run, HELD, {"a": accuracy}, patience=0)


def test_a_metric_that_is_no_number_is_named() -> None:
    held_out = HeldOut(start(model()), HELD, {"right": lambda output, labels: output.argmax(1) == labels})
    refused(ArgumentTypeError, r"metrics\['right'\]: returned a value of shape \(12,\)", held_out.evaluate)
