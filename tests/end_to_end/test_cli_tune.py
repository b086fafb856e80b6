"""`dpcore tune`: the winner alone is left, its statement is the selection's, and a kill changes no draw, no price."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpcore import accounting, tuning
from dpcore.accounting import PrivateSelection
from dpcore.cli import datasets, main
from dpcore.cli.train import training, tune
from dpcore.cli.train.settings import Settings
from dpcore.ledger import Ledger
from dpcore.statement import Statement
from dpcore.statement.assumptions import NO_LEDGER, SELECTED
from dpcore.tuning import Outcome
from tests.end_to_end.command_line import ask, say
from tests.end_to_end.test_cli_train import FILES, weights

SPACE = ("--space", "lr=0.1:2", "--space", "max-grad-norm=0.5,1")
RUN = ("tune", *SPACE, "--noise-multiplier", "2", "--epochs", "1", "--public-test-set", "--ledger", "l.db")


class Killed(BaseException):
    """What no except clause of the library catches: the disk is left as by a kill."""


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.chdir(tmp_path)
    return Ledger.create(tmp_path / "l.db", accept_file_system=True)


@pytest.fixture(scope="module")
def made() -> Outcome:
    data = datasets.load("digits")
    return tune.candidate(Settings(noise_multiplier=2.0, epochs=1).resolved(len(data)), data)


def test_the_winner_alone_is_left(tmp_path: Path, ledger: Ledger, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(tuning, "runs_at", lambda *_: 2)
    words = [word for word in RUN if word not in ("--noise-multiplier", "2")]
    told = ask(*words, "--epsilon", "3", "--law", "logarithmic", "--expected-runs", "4")
    assert {path.name for path in (tmp_path / "tuned").iterdir()} == FILES
    assert {path.name.partition("l.db")[0] for path in tmp_path.iterdir()} == {"tuned", ""}  # and the ledger's files
    assert "accuracy" not in capfd.readouterr().err

    statement = Statement.from_json((tmp_path / "tuned" / "statement.json").read_text())
    event = accounting.Event.from_dict(statement.event)
    assert isinstance(event, PrivateSelection)
    assert (event.expected_runs, event.shape, event.run) == (4.0, 0.0, tune_event(told["settings"]))
    assert 2.99 < statement.best_epsilon <= 3.0
    assert SELECTED in statement.caveats
    assert NO_LEDGER not in statement.caveats
    assert [run.planned for run in ledger.runs()] == [event]
    assert main(["verify", "tuned", "--ledger", "l.db"]) == 0

    assert set(told["chosen"]) == {"lr", "max_grad_norm"}
    assert 0.1 <= told["settings"]["lr"] <= 2.0
    assert {json.loads(line)["epsilon"] for line in Path("tuned/metrics.jsonl").read_text().splitlines()} == {
        statement.best_epsilon
    }
    measures, model = datasets.load("digits").tested_on(1), weights(tmp_path / "tuned")
    weight, bias = sorted(model.values(), key=np.ndim, reverse=True)
    found = (measures.test_inputs.reshape(-1, 64) @ weight.T + bias).argmax(axis=1) == measures.test_targets
    assert found.mean() == pytest.approx(told["test_accuracy"])
    assert main(["train", "--config", "tuned/config.json", "--out", "again"]) == 0  # one run of that noise, paid for
    assert len(ledger.runs()) == 2


def tune_event(settings: dict[str, Any]) -> accounting.Event:
    return Settings(**settings).plan(len(datasets.load("digits"))).event


def in_turn(made: Outcome, outcomes: list[Any], seen: list[Settings]) -> Callable[..., Outcome]:
    def candidate(settings: Settings, _dataset: Any) -> Outcome:
        seen.append(settings)
        if isinstance(outcome := outcomes.pop(0), BaseException):
            raise outcome
        return made._replace(score=outcome)

    return candidate


def test_a_killed_selection_goes_on_with_what_was_drawn(
    made: Outcome, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(tuning, "runs_at", lambda *_: 4)
    monkeypatch.setattr(tune, "candidate", in_turn(made, [0.5, Killed(), 0.9, ValueError("boom")], seen))
    with pytest.raises(Killed):
        main(RUN)
    assert [path.name for path in Path("tuned").iterdir()] == ["config.json"]
    assert Path("tuned.selection").stat().st_mode & 0o77 == 0
    for words, reason in (
        (["train", "--epsilon", "3", "--out", "tuned", "--overwrite"], "is not empty and has no dpcore run"),
        ([*RUN, "--seed", "1"], "one selection never continues another"),
        ([*RUN, "--law", "poisson"], "one selection never continues another"),
    ):
        assert reason in say(capsys, words, 2).err
    drawn = json.loads(Path("tuned.selection/selection.json").read_text())["left"]
    told = ask(*RUN)
    assert [settings.lr for settings in seen[2:]] == [settings["lr"] for settings, _ in drawn]
    assert told["settings"] == seen[2].to_dict()
    assert [run.releases for run in ledger.runs()] == [1]
    assert not Path("tuned.selection").exists()
    assert "boom" not in capsys.readouterr().err
    assert "already has a run" in say(capsys, RUN, 2).err


def test_nothing_is_released_if_no_run_succeeds(made: Outcome, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(tuning, "runs_at", lambda *_: 2)
    monkeypatch.setattr(tune, "candidate", in_turn(made, [ValueError("boom"), float("nan")], []))
    first, again = say(capsys, RUN, 2), say(capsys, RUN, 2)
    assert "no run succeeded, or none was made" in first.err
    assert "boom" not in first.err
    assert first.err.splitlines()[-1] == again.err.splitlines()[-1]
    monkeypatch.setattr(tune, "candidate", in_turn(made, [0.5, 0.6], []))
    assert ask(*RUN, "--overwrite")["status"] == "complete"


def test_a_rehearsal_shows_the_error_and_pays_nothing(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert "accuracy" in say(capsys, [*RUN, "--try"]).out
    trained: list[Any] = []

    def fail(run: training.Training, *_: Any, **__: Any) -> None:
        trained.append(run.private.loader.data.tree[0][:359].numpy())
        raise RuntimeError("the layer is missing")

    monkeypatch.setattr(training.Training, "run", fail)
    assert "the layer is missing" in say(capsys, [*RUN, "--try"], 1).err
    assert np.array_equal(trained, [datasets.load("digits").test_inputs])
    assert not ledger.runs()
    assert {path.name.partition("l.db")[0] for path in tmp_path.iterdir()} == {""}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "space: has one point"),
        ("--space lr=0.1", "space: has one point"),
        ("--space lr=1:1", "space='lr=1:1': high=1.0: must be more than low=1.0"),
        ("--space lr=-1:1", "low=-1.0: must be greater than 0"),
        ("--space lr", "write NAME=LOW:HIGH"),
        ("--space lrr=1:2", "did you mean 'lr'?"),
        ("--space lr=1:2 --space lr=3", "is there twice"),
        ("--space window=1:3", "only real numbers have a range"),
        ("--space method=dp_sgd,dp_adm", "did you mean dp_adam?"),
        ("--space lr=0.1:2 --lr 3", "lr=3.0: must not be given with a --space"),
        ("--space batch_size=32,64", "a run with batch_size=64 has another event"),
        ("--space method=dp_sgd,memf", "has method='memf', which no run can have"),
        ("--space noise-multiplier=1:2", "is no setting that may be drawn"),
        ("--space lr=0.1:2 --noise-multiplier 0", "noise_multiplier=0.0: must be above 0"),
        ("--space lr=0.1:2 --expected-runs 1", "expected_runs=1.0: must be more than 1"),
        ("--space lr=0.1:2 --law uniform", "'uniform' is unknown"),
        ("--space lr=0.1:2 --ledger none.db", "none.db"),
    ],
)
def test_what_is_no_selection_is_refused_before_it_is_paid(
    words: str, reason: str, ledger: Ledger, capsys: Any
) -> None:
    common = ["--epochs", "1", "--public-test-set"]
    given = words.split()
    common += [] if "--noise-multiplier" in words else ["--noise-multiplier", "2"]
    common += [] if "--ledger" in words else ["--ledger", "l.db"]
    assert reason in say(capsys, ["tune", *given, *common], 2).err
    assert not ledger.runs()
    assert not Path("tuned").exists()


def test_the_users_word_and_a_ledger_are_needed(capsys: Any) -> None:
    assert "add --public-test-set" in say(capsys, [word for word in RUN if word != "--public-test-set"], 2).err
    assert "ledger=None: must be given" in say(capsys, [*RUN[:-2]], 2).err
