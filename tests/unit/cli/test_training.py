"""A run of the command line: when it saves, in how many threads, and what is said and kept where it diverges."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("torch")
from dpcore import accounting
from dpcore.cli.datasets import Dataset
from dpcore.cli.interrupt import Interruption
from dpcore.cli.train.run_folder import RunFolder
from dpcore.cli.train.settings import Settings
from dpcore.cli.train.train import train_to_end as train
from dpcore.cli.train.training import Autosave, Training, cost, every
from dpcore.errors import DivergenceError
from dpcore.statement.verify import holds, verify


def training(factor: float = 1.0, model: str = "logistic", **more: Any) -> Training:
    inputs = np.linspace(0, factor, 200 * 4, dtype=np.float32).reshape(200, 1, 2, 2)
    targets = np.arange(200) % 3
    dataset = Dataset("small", inputs[:160], targets[:160], inputs[160:], targets[160:], classes=3)
    settings = Settings(method="dp_sgd", model=model, epsilon=3.0, delta=1e-3, epochs=3, batch_size=40, lr=0.5, **more)
    return Training(settings.resolved(160), dataset)


def poison(run: Training, values: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the steps of these numbers leave the parameters as those of a run that diverges do."""
    take = run.private.step

    def step(batch: Any) -> None:
        take(batch)
        if run.private.steps_taken in values:
            with torch.no_grad():
                next(run.model.parameters())[0, 0] = values[run.private.steps_taken]

    monkeypatch.setattr(run.private, "step", step)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_run_that_diverges_ends_with_what_it_spent_and_no_model(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = training()
    folder = RunFolder(tmp_path / "run")
    poison(run, {5: value}, monkeypatch)
    with pytest.raises(DivergenceError) as caught:
        train(run, folder, Interruption(), as_json=False)
    capsys.readouterr()
    stated = json.loads((folder.path / "statement.json").read_text())
    assert stated["steps_taken"] == 5 < stated["steps_planned"] == 12
    assert "diverged" in stated["note"]
    assert "Results decided to stop after 5 of 12 planned steps, so epsilon counts all planned steps" in stated["note"]
    assert stated["epsilon"] == stated["epsilon_planned"]
    assert holds(verify(stated))
    assert not {path.name for path in folder.path.iterdir()} & {"model.safetensors", "README.md"}
    sentence = str(caught.value)
    assert "after 5 of 12 steps the parameters are no longer finite; lower --lr (0.5)" in sentence
    spent = float(sentence.partition("epsilon = ")[2].split(maxsplit=1)[0])
    planned = run.private.epsilon(planned=True)
    assert accounting.smallest_epsilon(run.private.event_after(5), stated["delta"])[0] < planned
    assert run.private.epsilon() == planned <= spent <= planned * 1.001
    assert str(folder.path) in sentence


def test_a_held_out_loss_that_is_not_finite_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that still are numbers, of which no prediction is one."""
    run = training()
    poison(run, {3: -3e38, 4: 3e38}, monkeypatch)
    outcome = run.run(Interruption())
    assert (outcome.diverged, outcome.statement.steps_taken) == ("the held-out loss is", 4)
    assert "held-out loss" in outcome.statement.note


def test_a_comparison_goes_on_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One learning rate of a search that is too large is a result."""
    run = training()
    poison(run, {5: math.nan}, monkeypatch)
    outcome = run.run(Interruption(), RunFolder(tmp_path / "run"), alone=False)
    assert (outcome.diverged, outcome.statement.steps_taken) == ("", 12)
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_remarks_on_the_data_are_kept_for_the_person_who_starts_the_run() -> None:
    assert not training().remarks
    (sentence,) = training(255.0).remarks
    assert sentence.startswith("data[0]: its values are far from 1 in size")


def test_weights_of_a_file_are_where_it_begins_and_declared(tmp_path: Path) -> None:
    given = {"1.weight": torch.arange(12.0).reshape(3, 4), "1.bias": torch.zeros(3)}
    torch.save(given, tmp_path / "w.pt")
    run = training(weights=str(tmp_path / "w.pt"))
    assert torch.equal(run.model.state_dict()["1.weight"], given["1.weight"])
    assert [each for each in run.statement(0).caveats if "weights that the run begins from" in each]
    assert not [each for each in training().statement(0).caveats if "begins from" in each]
    assert not run.remarks
    torch.save({**given, "1.weight": torch.zeros(5, 4), "1.bias": torch.zeros(5)}, tmp_path / "w.pt")
    (sentence,) = training(weights=str(tmp_path / "w.pt")).remarks
    assert sentence.startswith("weights: 1.weight, 1.bias begin as without a file")


# When `dpcore train` saves: by the plan, by time, and never so often that saving is what it does.


def saves(steps: int, a_step: float, a_save: float) -> list[int]:
    """After which of so many steps it saves, where a step and a save take so many seconds."""
    now, found = [0.0], []

    def save() -> None:
        now[0] += a_save
        found.append(step)

    autosave = Autosave(save, steps, clock=lambda: now[0])
    for step in range(1, steps + 1):
        now[0] += a_step
        autosave.after(step)
    return found


def test_a_crash_costs_at_most_a_hundredth_of_the_plan_or_a_minute():
    assert saves(1000, 0.5, 0.01) == list(range(10, 1001, 10))
    assert saves(50, 0.5, 0.01) == list(range(1, 51))
    assert every(10**6) == 10**4
    assert "every 23 of 2,300 steps or 60 seconds" in cost(2300)
    assert saves(10**5, 1.0, 0.5)[:3] == [60, 120, 180]
    assert saves(300, 100.0, 1.0) == [*range(1, 301)]


def test_a_save_in_any_case_counts():
    found: list[int] = []
    autosave = Autosave(lambda: found.append(0), 1000, 95, lambda: 0.0)
    autosave.after(99)
    autosave.now(100)
    autosave.after(105)
    assert len(found) == 1
    autosave.after(110)
    assert len(found) == 2


# Small models run in one thread, unless a person has chosen.
