"""Private selection: what is sealed, paid for and kept, and the law of the winner through crashes and kills."""

import json
import math
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

import dpcore
from dpcore import accounting, tuning
from dpcore.accounting import Event, Gaussian, PrivateSelection
from dpcore.accounting.run_law import any_of
from dpcore.errors import ArgumentError, ArgumentTypeError, BudgetError, OverlapError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.spec.rounded_normal import distance
from dpcore.statement.statement import Statement
from dpcore.statement.verify import verify
from dpcore.tuning import Choice, LogUniform, Outcome, Winner, rehearse, select
from tests.depth import chosen
from tests.refused import refused

EVENT = Gaussian(5.0)
SPACE = {"lr": LogUniform(1e-3, 1.0), "momentum": Choice((0.0, 0.9))}
LAW = (0.3, 0.2, 0.5)  # a run dies, or has score 1, or 2
MEAN = 3.0


class Killed(BaseException):
    """What no except clause of the library catches: the disk is left as by a kill."""


class Draws(random.Random):
    """The operating system's randomness, replaced by a seed."""

    randbits = random.Random.getrandbits

    def token_hex(self, size: int) -> str:
        return self.randbytes(size).hex()


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "l.db", accept_file_system=True)


def best(folder: Path, ledger: Ledger, run: Callable[[dict[str, Any]], Outcome], **changes: Any) -> Winner:
    settings: dict[str, Any] = {"scored_on": "public", "expected_runs": MEAN, "shape": 1.0} | changes
    return select(
        run, settings.pop("space", SPACE), settings.pop("event", EVENT), folder=folder, ledger=ledger, **settings
    )


def scored(settings: dict[str, Any]) -> Outcome:
    return Outcome(-abs(math.log(settings["lr"] / 0.1)), json.dumps(settings).encode(), EVENT)


def law_of_winner(shape: float | None) -> list[float]:
    """Return how likely nothing, score 1 and score 2 win: differences of E x^K."""
    at_most = [1.0 - any_of(shape, MEAN, 1.0 - sum(LAW[: k + 1])) for k in range(3)]
    return np.diff(at_most, prepend=0.0).tolist()


def test_releases_the_best_and_keeps_nothing_of_the_others(tmp_path: Path, ledger: Ledger, capfd: Any) -> None:
    seen: list[dict[str, Any]] = []

    def run(settings: dict[str, Any]) -> Outcome:
        assert [entry.planned for entry in ledger.runs()] == [PrivateSelection(EVENT, 200.0)]  # paid before
        assert ledger.runs()[0].releases == 1
        seen.append(settings)
        sys.stdout.write("a line")
        os.system("echo another")  # noqa: S605
        return scored(settings)

    won = best(tmp_path / "s", ledger, run, expected_runs=200.0)
    assert won.settings == max(seen, key=lambda settings: scored(settings).score)
    assert won.result == json.dumps(won.settings).encode()
    assert won.paid == ledger.runs()[0].run_id
    assert all(1e-3 <= settings["lr"] <= 1.0 and settings["momentum"] in (0.0, 0.9) for settings in seen)
    assert "how long" in won.remark
    kept = json.loads((tmp_path / "s" / "selection.json").read_text())
    assert set(kept) == {"id", "terms", "best"}  # neither K nor the other candidates
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"selection.json", "lock"}
    assert capfd.readouterr() == ("", "")
    assert best(tmp_path / "s", ledger, run, expected_runs=200.0, name="another name") == won
    assert len(ledger.runs()) == 1
    other = Ledger.create(tmp_path / "other.db", accept_file_system=True)  # no ledger stands for what it did not pay
    assert best(tmp_path / "s", other, run, expected_runs=200.0).paid == other.runs()[0].run_id
    assert best(tmp_path / "t", other, scored).paid == other.runs()[1].run_id


@pytest.mark.parametrize("shape", [1.0, None])
def test_the_winners_law_is_the_theorems_though_runs_die(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, shape: float | None
) -> None:
    monkeypatch.setattr(tuning, "secrets", Draws(1))
    monkeypatch.setattr(os, "fsync", lambda _file: None)
    monkeypatch.setattr(tuning, "_paid", lambda *_: "")
    fate = np.random.default_rng(2)

    def run(settings: dict[str, Any]) -> Outcome:
        score = int(fate.choice(3, p=LAW))
        if score:
            return Outcome(score, b"", EVENT)
        if fate.random() < 0.8:
            raise Killed
        return Outcome(math.nan, b"", EVENT) if fate.random() < 0.5 else Outcome("good", b"", EVENT)  # type: ignore[arg-type]

    counts: Counter[float] = Counter()
    times = chosen(300, 6000)
    for i in range(times):
        while True:
            try:
                counts[best(tmp_path / str(i), ledger, run, shape=shape).score or 0.0] += 1
                break
            except Killed:
                continue
    assert chisquare([counts[score] for score in (0.0, 1.0, 2.0)], times * np.array(law_of_winner(shape))).pvalue > 1e-3


def test_ties_are_broken_by_coins_not_by_order(tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "secrets", Draws(3))
    monkeypatch.setattr(tuning, "runs_at", lambda *_: 2)
    monkeypatch.setattr(tuning, "_paid", lambda *_: "")
    first = 0
    for i in range(60):
        made: list[bytes] = []

        def run(settings: dict[str, Any], made: list[bytes] = made) -> Outcome:
            made.append(repr(settings).encode())
            return Outcome(1.0, made[-1], EVENT)

        first += best(tmp_path / str(i), ledger, run).result == made[0]
    assert 15 < first < 45


def test_kill_9_at_any_place(tmp_path: Path, ledger: Ledger) -> None:
    """Processes are killed inside runs, and between them: draws stay, the ledger has one entry for each selection."""
    fate, counts, kills = random.Random(4), Counter[float](), 0
    selections = chosen(6, 160)
    for i in range(selections):
        sealed = None
        while True:
            seed, after = fate.random(), fate.choice([None, None, 1, 2])
            process = os.fork()
            if process == 0:
                _child(tmp_path / str(i), ledger, seed, after)
            status = os.waitpid(process, 0)[1]
            assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
            killed = os.WIFSIGNALED(status)
            state = tmp_path / str(i) / "selection.json"
            now = json.loads(state.read_text()) if state.exists() else None
            if sealed is not None:
                before, left = sealed.get("left", []), now.get("left", [])
                assert now["id"] == sealed["id"]
                assert left == before[len(before) - len(left) :]
            if not killed:
                break
            kills, sealed = kills + 1, now or sealed
        assert now is not None
        counts[(now["best"] or {"score": 0.0})["score"]] += 1
        paid = [entry for entry in ledger.runs() if entry.releases and now["id"] in entry.name]
        assert [entry.event for entry in paid] == [PrivateSelection(EVENT, MEAN)]
    assert kills >= chosen(3, 100)
    # Kills between runs hit whatever the results are, so only those inside of a run, at LAW[0], are part of its law.
    assert (
        chosen(1.0, chisquare([counts[x] for x in (0.0, 1.0, 2.0)], selections * np.array(law_of_winner(1.0))).pvalue)
        > 1e-3
    )


def _child(folder: Path, ledger: Ledger, seed: float, after: int | None) -> None:
    """Select in a process that kills itself in a run that dies; or once, when it has sealed (1) or paid (2)."""
    fate, write, pay = random.Random(seed), tuning._write, tuning._paid

    def run(_settings: dict[str, Any]) -> Outcome:
        score = fate.choices((0, 1, 2), LAW)[0]
        if not score:
            os.kill(os.getpid(), signal.SIGKILL)
        return Outcome(score, b"", EVENT)

    def die_once(at: int) -> None:  # nothing has begun: dying here costs no run
        if after == at and not (begun := folder / "begun").exists():
            begun.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def written(path: Path, state: Any) -> None:
        write(path, state)
        die_once(1)

    def paid(*arguments: Any) -> str:
        entry = pay(*arguments)
        die_once(2)
        return entry

    tuning._write, tuning._paid = written, paid
    try:
        best(folder, ledger, run)
    except BaseException:  # noqa: BLE001
        os._exit(1)
    os._exit(0)


def test_of_two_copies_of_a_folder_one_has_a_winner(tmp_path: Path, ledger: Ledger) -> None:
    """Both made the rest of the runs, each its own, and one entry has paid."""
    place, copied, made = tmp_path / "one", tmp_path / "two", []

    def run(settings: dict[str, Any]) -> Outcome:
        if not copied.exists():
            shutil.copytree(place, copied)
        made.append(settings)
        return Outcome(float(len(made)), bytes([len(made)]), EVENT)

    def selected(folder: Path) -> Winner:
        return best(folder, ledger, run, expected_runs=30.0, shape=None)

    winner = selected(place)
    refused(PrivacyError, "a copy of its folder has ended with another winner", selected, copied)
    assert len(made) > winner.score >= 2
    assert selected(place) == winner
    assert ledger.verify().valid
    entries = [run for run in ledger.runs() if run.description["scored_on"]]
    assert len(entries) == 1


def test_refuses_what_is_no_selection(tmp_path: Path, ledger: Ledger) -> None:
    def ask(**changes: Any) -> Winner:
        return best(tmp_path / "r", ledger, scored, **changes)

    refused(ArgumentError, "at least two points", ask, space={})
    refused(ArgumentError, "at least two points", ask, space={"lr": Choice((0.1, 0.1))})
    refused(ArgumentTypeError, r"space\['lr'\]=3: must be a LogUniform", ask, space={"lr": 3})
    refused(ArgumentError, "high=1.0: must be more than low=1.0", LogUniform, 1.0, 1.0)
    refused(ArgumentError, "at least one value", Choice, ())
    refused(ArgumentTypeError, "values='sgd': must be a list or a tuple", Choice, "sgd")
    refused(ArgumentError, "scored_on='training': .*training data is neither", ask, scored_on="training")
    refused(ArgumentError, "expected_runs=501.0: must be at most 500", ask, expected_runs=501.0)
    assert not ledger.runs()
    ask()
    refused(ArgumentError, "one selection never continues another", ask, expected_runs=4.0)
    with pytest.raises(PrivacyError, match="must not change the plan"):
        best(tmp_path / "e", ledger, lambda _: Outcome(1.0, b"", Gaussian(4.0)))


def test_a_rehearsal_shows_what_a_selection_hides(tmp_path: Path, ledger: Ledger) -> None:
    def fail(_settings: dict[str, Any]) -> Outcome:
        raise ValueError("the layer is missing")

    assert rehearse(scored, SPACE, EVENT).event == EVENT
    refused(ValueError, "the layer is missing", rehearse, fail, SPACE, EVENT)
    assert best(tmp_path / "f", ledger, fail).result is None
    refused(ArgumentTypeError, "returned NoneType", rehearse, lambda _: None, SPACE, EVENT)
    refused(ArgumentError, "score=nan: must be finite", rehearse, lambda _: Outcome(math.nan, b"", EVENT), SPACE, EVENT)
    refused(PrivacyError, "another one", rehearse, lambda _: Outcome(1.0, b"", Gaussian(4.0)), SPACE, EVENT)
    refused(ArgumentError, "at least two points", rehearse, scored, {}, EVENT)


def test_scores_of_data_that_are_trained_on_are_no_bad_luck(tmp_path: Path, ledger: Ledger) -> None:
    torch = pytest.importorskip("torch")
    from dpcore.methods import dp_sgd
    from dpcore.torch import HeldOut, make_private

    data = torch.zeros(20, 3), torch.zeros(20, dtype=torch.int64)

    def run(settings: dict[str, Any]) -> Outcome:
        method = dp_sgd(lr=settings["lr"], noise_multiplier=5.0, batch_size=20)
        private = make_private(torch.nn.Linear(3, 2), data, method, steps=1, target_delta=1e-5)
        watch = HeldOut(private, (data[0][:9], data[1][:9]), {"loss": torch.nn.functional.cross_entropy})
        return Outcome(watch.evaluate()["loss"], b"", EVENT)

    refused(OverlapError, "must not be trained on", best, tmp_path / "o", ledger, run)


def test_a_budget_is_asked_before_the_first_run(tmp_path: Path) -> None:
    small = Ledger.create(tmp_path / "small.db", budget=(0.1, 1e-5), accept_file_system=True)
    with pytest.raises(BudgetError):
        best(tmp_path / "b", small, lambda _: pytest.fail("a run was made"))
    exact = Ledger.create(tmp_path / "exact.db", budget=(1.2, 1e-5), accept_file_system=True)
    best(tmp_path / "c", exact, scored)
    assert exact.verify().valid
    assert exact.total().fixed <= 1.2 < accounting.epsilon(PrivateSelection(EVENT, MEAN), 1e-5, "rdp")


def test_the_statement_is_that_of_the_selection(tmp_path: Path) -> None:
    method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=2.0, batch_size=5)
    sampler = dpcore.sampling.PoissonSampler(dataset_size=20, batch_size=5)
    made = dpcore.minimize(lambda x, i: np.ones((len(i), 1)), np.zeros(1), sampler, method, steps=3).statement(1e-5)
    event, ledger = Event.from_dict(made.event), Ledger.create(tmp_path / "ledger")
    run = Outcome(1.0, made.to_json().encode(), event)
    winner = select(
        lambda _: run, SPACE, event, folder=tmp_path / "secret", ledger=ledger, scored_on="public", expected_runs=MEAN
    )
    stated = winner.statement(Statement.from_json((winner.result or b"").decode()), ledger)
    assert stated.best_epsilon == pytest.approx(accounting.epsilon(winner.event, 1e-5))
    # Draws of MEAN runs: the union bound is not below the bound on so many draws.
    assert stated.noise["grid"]["law_distance"] >= distance(MEAN * 3)
    assert not [finding for finding in verify(stated) if finding.status == "failed"]
    other = winner._replace(event=PrivateSelection(EVENT, MEAN))
    refused(PrivacyError, "must be the statement of the winning run", other.statement, made, ledger)
