"""`dpcore train --resume`: runs that are killed or stopped go on, release nothing twice, and end as the straight run.

Commands run in forked children, which kill or interrupt themselves at a chosen step. All draw one key, so that what a
resumed run ends with can be compared with what nobody interrupted.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("torch")
pytest.importorskip("matplotlib")
import torch

from dpcore import accounting, fingerprint
from dpcore.cli import main
from dpcore.cli.reports.gradients import load_gradients
from dpcore.cli.train import checkpoint
from dpcore.ledger import Ledger
from dpcore.spec import keys
from dpcore.statement import Statement, verify
from dpcore.statement.text import format_epsilon
from dpcore.torch import PrivateRun

KEY = bytes(range(32))
STEPS, EPOCH = 69, 23
# What a checkpoint must hold: an average, a schedule's place, a clip norm, a filter's state, a record.
RUN = (
    *("--epsilon", "1", "--epochs", "3", "--method", "disk", "--ema", "0.9", "--schedule", "cosine"),
    *("--clipping", "standard", "--clip-quantile", "0.5", "--record-gradients", "3"),
)


@pytest.fixture(autouse=True, scope="module")
def _ready_to_fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One thread, since others do not survive a fork; and a run, so that the children need not import all of torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(["train", *RUN, "--out", str(tmp_path_factory.mktemp("first"))]) == 0
    yield
    torch.set_num_threads(threads)


def _child(words: tuple[str, ...], moments: dict[int, int], code: str, told: Path) -> None:
    keys.new_key = lambda: KEY
    if code:
        fingerprint.code_digest = lambda *_: code
    step = PrivateRun.step

    def then_signal(run: PrivateRun, batch: Any) -> None:
        step(run, batch)
        if run.steps_taken in moments:
            os.kill(os.getpid(), moments[run.steps_taken])

    PrivateRun.step = then_signal
    with told.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        status = main(["train", *words])
    sys.exit(status)


def command(folder: Path, *words: str, kill: int = 0, stop: int = 0, code: str = "") -> tuple[int, str]:
    """Run a command in a child; return its status, negative where it was killed, and what it printed.

    `kill` and `stop` are the steps after which the child gets SIGKILL and SIGINT.
    """
    told = folder / "told"
    moments = {kill: signal.SIGKILL, stop: signal.SIGINT}
    child = multiprocessing.get_context("fork").Process(target=_child, args=(words, moments, code, told))
    child.start()
    child.join()
    return child.exitcode or 0, told.read_text()


def begin(folder: Path, *more: str, budget: tuple[float, float] | None = None, **moments: int) -> tuple[int, str]:
    folder.mkdir()
    Ledger.create(folder / "ledger", budget=budget)
    words = (*RUN, "--ledger", str(folder / "ledger"), "--out", str(folder / "run"), *more)
    return command(folder, *words, **moments)


def resume(folder: Path, *words: str, **moments: Any) -> tuple[int, str]:
    return command(folder, "--resume", str(folder / "run"), *words, **moments)


def weights(folder: Path) -> bytes:
    content = (folder / "run" / "model.safetensors").read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def statement(folder: Path) -> Statement:
    found = Statement.from_json((folder / "run" / "statement.json").read_text())
    assert verify.holds(verify.verify(found))
    return found


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def charged(folder: Path) -> tuple[int, int]:
    (run,) = Ledger.open(folder / "ledger").runs()
    return run.releases, run.forks


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("straight") / "case"
    status, told = begin(folder)
    assert status == 0, told
    return folder


def assert_ends_as(folder: Path, straight: Path) -> None:
    assert weights(folder) == weights(straight)
    assert charged(folder) == charged(straight) == (STEPS, 0)
    mine, other = statement(folder), statement(straight)
    assert (mine.epsilon, mine.event, mine.note, mine.steps_abandoned) == (other.epsilon, other.event, "", 0)
    record, expected = load_gradients(folder / "run"), load_gradients(straight / "run")
    np.testing.assert_array_equal(record.released, expected.released)
    np.testing.assert_array_equal(record.filtered, expected.filtered)
    assert {path.name for path in (folder / "run").iterdir()} == {path.name for path in (straight / "run").iterdir()}
    assert sorted(path.name for path in folder.iterdir()) == ["ledger", "run", "told"]


def test_a_run_that_is_killed_again_and_again_ends_as_the_straight_one(tmp_path: Path, straight: Path) -> None:
    """Killed in the first epoch, in a later one, in a replay, before an evaluation, and after the last step."""
    folder = tmp_path / "case"
    assert begin(folder, kill=5)[0] == -signal.SIGKILL
    for moment in (30, 26, 2 * EPOCH, STEPS):
        before = charged(folder)[0]
        status, told = resume(folder, kill=moment)
        assert status == -signal.SIGKILL
        assert before <= charged(folder)[0] <= STEPS
        assert f"with a replay: steps up to {before} may" in told, told
        assert statement(folder).steps_taken >= moment
    status, told = resume(folder)
    assert (status, "to go on" in told) == (0, False), told
    assert_ends_as(folder, straight)
    assert (folder / "run" / "metrics.jsonl").read_bytes() == (straight / "run" / "metrics.jsonl").read_bytes()


def test_a_stopped_run_says_how_to_go_on_and_does(tmp_path: Path, straight: Path) -> None:
    folder = tmp_path / "case"
    status, told = begin(folder, stop=30)
    assert status == 130
    assert "Stopped by Ctrl-C after 30 of 69 steps" in told
    assert f"to go on           dpcore train --resume {folder / 'run'}" in told
    assert charged(folder) == (30, 0)
    assert stat.S_IMODE((folder / "run.checkpoint").stat().st_mode) == 0o600
    # No key of the checkpoint is in a public file.
    secret = checkpoint.read(folder / "run.checkpoint")["optimizer"]["dpcore"]["secret"]
    for path in (folder / "run").iterdir():
        assert secret["noise_key"].encode() not in path.read_bytes()
        assert bytes.fromhex(secret["noise_key"]) not in path.read_bytes()
    status, told = resume(folder)
    assert status == 0
    assert "Going on after step 30 of 69: nothing was released since" in told
    assert_ends_as(folder, straight)
    assert [line["step"] for line in lines(folder)] == [23, 30, 46, 69]
    assert [line for line in lines(folder) if line["step"] != 30] == lines(straight)


def test_a_run_that_is_stopped_in_a_replay_is_not_complete(tmp_path: Path, straight: Path) -> None:
    """All steps may have been released, and count; the parameters are still those of an earlier one."""
    folder = tmp_path / "case"
    begin(folder, kill=STEPS)
    status, told = resume(folder, "--json", stop=50)
    assert status == 130
    content = json.loads(told[told.index("{") :])
    assert content["status"] == "stopped by Ctrl-C"
    assert content["resume"] == f"dpcore train --resume {folder / 'run'}"
    counted = statement(folder)
    assert counted.steps_taken == STEPS
    assert "The parameters are those after step 50; steps up to 69 may have been released" in counted.note
    assert charged(folder) == (STEPS, 0)
    assert resume(folder)[0] == 0
    assert_ends_as(folder, straight)


def test_what_has_changed_forks_and_is_charged(tmp_path: Path, straight: Path) -> None:
    folder = tmp_path / "case"
    begin(folder, kill=30)
    before = charged(folder)[0]
    status, told = resume(folder, code="newer", kill=40)
    assert status == -signal.SIGKILL
    lost = before - EPOCH
    assert "after step 23 of 69 as a fork, with fresh noise: later steps may have been released" in told
    counted = told.split(f"{lost} abandoned steps stay counted; with them the whole run comes to ")[1]
    upper = statement(folder)
    assert (upper.steps_taken, upper.steps_abandoned) == (2 * EPOCH, lost)
    # The fork was saved with its first step, so it is replayed and not forked once more.
    status, told = resume(folder, code="newer")
    assert status == 0
    assert "with a replay" in told
    assert charged(folder) == (STEPS + lost, 1)
    told = statement(folder)
    assert (told.steps_taken, told.steps_abandoned, told.randomness["forks"]) == (STEPS, lost, 1)
    (run,) = Ledger.open(folder / "ledger").runs()
    assert accounting.Event.from_dict(told.event) == run.event
    assert told.best_epsilon > statement(straight).best_epsilon
    assert counted.startswith(f"epsilon = {format_epsilon(told.best_epsilon)}.")
    assert weights(folder) != weights(straight)
    assert lines(folder)[0] == lines(straight)[0]
    assert lines(folder)[-1]["epsilon"] == told.best_epsilon


def test_a_fork_that_the_budget_refuses_leaves_the_run_to_be_replayed(tmp_path: Path, straight: Path) -> None:
    folder = tmp_path / "case"
    begin(folder, budget=(1.0, 1e-5), kill=30)
    status, told = resume(folder, code="newer")
    assert status == 3
    assert "Stopped by the ledger's budget after 23 of 69 steps" in told
    assert "if the ledger has room again" in told
    assert lines(folder) == lines(straight)[:1]
    assert resume(folder)[0] == 0
    assert weights(folder) == weights(straight)
    assert charged(folder)[0] == STEPS


@pytest.mark.slow
def test_a_run_that_the_budget_ended_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "case"
    status, told = begin(folder, budget=(0.8, 1e-5))
    assert status == 3, told
    ended, held = statement(folder), lines(folder)
    assert 0 < ended.steps_taken < STEPS
    assert resume(folder)[0] == 3
    again = statement(folder)
    assert (again.steps_taken, again.epsilon, lines(folder)) == (ended.steps_taken, ended.epsilon, held)
    assert "Stopped by the ledger's budget" in again.note


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its second epoch."""
    folder = tmp_path_factory.mktemp("stopped") / "case"
    assert begin(folder, stop=30)[0] == 130
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["train", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("dpcore: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_what_cannot_go_on_is_refused_and_changes_nothing(
    stopped: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "case"
    shutil.copytree(stopped, folder)
    run, saved, ledger = (str(folder / name) for name in ("run", "run.checkpoint", "ledger"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    resumed = ("--resume", run, "--ledger", ledger)

    (toml := tmp_path / "run.toml").write_text("epochs = 3")
    for words in (("--lr", "1"), ("--overwrite",), ("--out", "x"), ("--config", str(toml)), ("--epochs", "3")):
        assert f"{words[0]}: must be left out" in refused(capsys, *resumed, *words)
    assert "already holds a run; go on with it (dpcore train --resume" in refused(capsys, *RUN, "--out", run)
    assert "holds no run of dpcore train" in refused(capsys, "--resume", str(folder))
    assert "run': is complete" in refused(capsys, "--resume", str(straight / "run"))

    other = tmp_path / "other"
    Ledger.create(other)
    assert "is not the one that pays for this run" in refused(capsys, "--resume", run, "--ledger", str(other))
    assert "does not exist" in refused(capsys, "--resume", run, "--ledger", str(tmp_path / "none"))
    exported = json.loads(json.dumps(Ledger.open(ledger).export()))
    begun = {name: exported[name][:1] for name in ("entries", "seals")}
    Ledger.restore(tmp_path / "older", {**exported, **begun})
    assert "is a copy from before this run" in refused(capsys, "--resume", run, "--ledger", str(tmp_path / "older"))

    config = Path(run, "config.json")
    changed = json.loads(config.read_text())
    changed["settings"]["lr"] = 0.25
    config.write_text(json.dumps(changed))
    assert "its lr is 0.25, and the run has 0.5; put it back" in refused(capsys, *resumed)
    config.write_bytes(before[config])

    stated = Path(run, "statement.json")
    changed = json.loads(stated.read_text())
    changed["ledger"]["run"] = "another"
    stated.write_text(json.dumps(changed))
    assert "belongs to another run" in refused(capsys, *resumed)
    stated.write_bytes(before[stated])

    content = bytearray(before[Path(saved)])
    key = checkpoint.read(Path(saved))["optimizer"]["dpcore"]["secret"]["noise_key"].encode()
    content[content.index(key)] ^= 1
    Path(saved).write_bytes(content)
    assert "is damaged" in refused(capsys, *resumed)
    Path(saved).write_bytes(b"short")
    assert "is damaged" in refused(capsys, *resumed)
    torch.save({"model": {}}, saved)
    assert "no checkpoint" in refused(capsys, *resumed)
    Path(saved).unlink()
    assert "run.checkpoint, is missing; put it back" in refused(capsys, *resumed)
    Path(saved).write_bytes(before[Path(saved)])

    fcntl = pytest.importorskip("fcntl")
    with config.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another command is at work in it" in refused(capsys, *resumed)
        assert "another command is at work in it" in refused(capsys, *RUN, "--out", run, "--overwrite")
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_ledger_that_was_moved_is_asked_for(
    stopped: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "case"
    shutil.copytree(stopped, folder)
    saved = checkpoint.read(folder / "run.checkpoint")
    checkpoint.write(folder / "run.checkpoint", {**saved, "ledger": str(folder / "gone")})
    assert "say where it is now with --ledger FILE" in refused(capsys, "--resume", str(folder / "run"))
    assert resume(folder, "--ledger", str(folder / "ledger"), stop=40)[0] == 130
    assert resume(folder)[0] == 0, "the new place is remembered"
    assert_ends_as(folder, straight)


def test_a_run_without_a_ledger_keeps_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, told = command(tmp_path, "--epsilon", "1", "--epochs", "2", "--out", str(tmp_path / "run"), stop=30)
    assert (status, "to go on" in told) == (130, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "told"]
    assert "has no checkpoint: only a run with --ledger keeps one" in refused(capsys, "--resume", str(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_without_guarantee_goes_on_too(tmp_path: Path) -> None:
    """Its epsilon is infinite, which a checkpoint has to hold, too."""
    folder = tmp_path / "case"
    folder.mkdir()
    Ledger.create(folder / "ledger")
    words = ("--noise-multiplier", "0", "--epochs", "2", "--ledger", str(folder / "ledger"))
    status, told = command(folder, *words, "--out", str(folder / "run"), stop=30)
    assert status == 130, told
    assert resume(folder)[0] == 0
    assert [line["epsilon"] for line in lines(folder)] == ["inf"] * 3
