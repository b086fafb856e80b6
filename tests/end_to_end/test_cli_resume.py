"""`dpcore train --resume`: runs that are killed or stopped go on, under fresh noise, and pay for what a kill lost.

Commands run in forked children, which kill or interrupt themselves at a chosen step.
"""

import json
import os
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
from dpcore import accounting
from dpcore.cli import main
from dpcore.cli.gradients import load_gradients
from dpcore.cli.train import training
from dpcore.ledger import Ledger
from dpcore.statement import Statement, verify
from dpcore.torch import PrivateRun, save_state
from tests.end_to_end.command_line import forked, say
from tests.unit.ledger_tools import restored

STEPS, EPOCH = 69, 23
# What a checkpoint must hold: an average, a schedule's place, a clip norm, a filter's state, a record.
RUN = (
    *("--epsilon", "1", "--epochs", "3", "--method", "disk", "--ema", "0.9", "--schedule", "cosine"),
    *("--clipping", "standard", "--clip-quantile", "0.5", "--record-gradients", "3"),
)


@pytest.fixture(autouse=True, scope="module")
def _ready_to_fork(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run, so that the children need not import all of torch."""
    assert main(["train", *RUN, "--epochs", "1", "--out", str(tmp_path_factory.mktemp("first"))]) == 0


def command(folder: Path, *words: str, kill: int = 0, stop: int = 0, number: int = signal.SIGINT) -> tuple[int, str]:
    """Run a command in a child; return its status, negative where it was killed, and what it printed.

    `kill` and `stop` are the steps after which the child gets SIGKILL and another signal.
    """
    told, step, moments = folder / "told", PrivateRun.step, {kill: signal.SIGKILL, stop: number}
    told.unlink(missing_ok=True)

    def then_signal(run: PrivateRun, batch: Any) -> None:
        step(run, batch)
        if run.steps_taken in moments:
            os.kill(os.getpid(), moments[run.steps_taken])

    child = forked(("train", *words), told, told, lambda: setattr(PrivateRun, "step", then_signal))
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


def at(folder: Path) -> int:
    """The step of the checkpoint."""
    return int(training.read_checkpoint(folder / "run.checkpoint")["optimizer"]["dpcore"]["public"]["step"])


def assert_complete(folder: Path, straight: Path, lost: int) -> None:
    """All steps are taken, `lost` others are charged, and nothing is missing from the folder."""
    mine, other = statement(folder), statement(straight)
    assert (mine.steps_taken, mine.steps_abandoned, mine.note) == (STEPS, lost, "")
    (run,) = Ledger.open(folder / "ledger").runs()
    assert run.releases == STEPS + lost
    assert accounting.Event.from_dict(mine.event) == run.event
    assert (mine.best_epsilon > other.best_epsilon) == (lost > 0)
    assert lines(folder)[-1]["epsilon"] == mine.best_epsilon
    assert len(load_gradients(folder / "run").released) == STEPS
    assert {path.name for path in (folder / "run").iterdir()} == {path.name for path in (straight / "run").iterdir()}
    assert sorted(path.name for path in folder.iterdir()) == ["ledger", "run", "told"]
    assert weights(folder) != weights(straight)


def test_a_run_that_is_killed_again_and_again_pays_for_the_steps_since_its_checkpoints(tmp_path, straight: Path):
    """Killed in the first epoch, in a later one, before an evaluation, and after the last step."""
    folder, lost = tmp_path / "case", 0
    status, told = begin(folder, kill=5)
    assert status == -signal.SIGKILL
    assert "a checkpoint is saved every 1 of 69 steps or 60 seconds" in " ".join(told.split())
    for moment in (30, 2 * EPOCH, STEPS):
        here, before = at(folder), charged(folder)[0]
        now = before - here - lost  # reserved since the checkpoint by the child that was killed
        status, told = resume(folder, kill=max(moment, here + 1))
        assert status == -signal.SIGKILL
        told = " ".join(told.split())
        if now:
            assert (
                f"after step {here} of 69, with fresh noise. This costs {now} step{'' if now == 1 else 's'}" in told
            ), told
        else:
            assert "This costs 0 steps: nothing was released since." in told, told
        lost += now
        assert charged(folder)[0] >= statement(folder).steps_abandoned == lost
    here = at(folder)
    lost += charged(folder)[0] - here - lost
    status, told = resume(folder)
    assert (status, "to continue" in told) == (0, False), told
    assert_complete(folder, straight, lost)


def test_a_stopped_run_says_how_to_go_on_and_does_at_no_cost(tmp_path, straight: Path):
    folder = tmp_path / "case"
    status, told = begin(folder, stop=30, number=signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert "Stopped by SIGTERM after 30 of 69 steps" in told
    assert f"to continue        dpcore train --resume {folder / 'run'}" in told
    assert (charged(folder), at(folder)) == ((30, 0), 30)
    assert stat.S_IMODE((folder / "run.checkpoint").stat().st_mode) == 0o600
    # No key of the checkpoint is in a public file.
    secret = training.read_checkpoint(folder / "run.checkpoint")["optimizer"]["dpcore"]["secret"]
    for path in (folder / "run").iterdir():
        assert secret["noise_key"].encode() not in path.read_bytes()
        assert bytes.fromhex(secret["noise_key"]) not in path.read_bytes()
    status, told = resume(folder)
    assert status == 0
    assert "Continuing after step 30 of 69, with fresh noise. This costs 0 steps" in " ".join(told.split())
    assert_complete(folder, straight, 0)
    assert [line["step"] for line in lines(folder)] == [23, 30, 46, 69]


def test_a_run_that_pays_for_a_kill_ends_with_a_sentence_and_its_results(tmp_path, straight: Path):
    """The budget is that of the plan: what the kill cost is missing at the end."""
    folder = tmp_path / "case"
    begin(folder, budget=(1.0, 1e-5), kill=30)
    lost = charged(folder)[0] - at(folder)
    assert lost > 0
    status, told = resume(folder)
    assert status == 3, told
    assert "Traceback" not in told
    assert f"Stopped by the ledger's budget after {STEPS - lost} of 69 steps" in told
    assert "held-out accuracy" in told
    ended = statement(folder)
    assert (ended.steps_taken, ended.steps_abandoned) == (STEPS - lost, lost)
    assert ended.note.startswith("Stopped by the ledger's budget: row=")
    assert ended.best_epsilon <= 1.0
    assert charged(folder)[0] == STEPS
    assert weights(folder)


@pytest.mark.slow
def test_a_run_that_the_budget_ended_stays_as_it_is(tmp_path):
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


def refused(capsys, *words: str) -> str:
    printed = say(capsys, ["train", *words], 2)
    assert printed.out == ""
    *before_it, sentence = printed.err.splitlines()
    assert sentence.startswith("dpcore: ")
    assert all(said.startswith("Training ") for said in before_it)
    return sentence


def test_what_cannot_go_on_is_refused_and_changes_nothing(stopped: Path, straight: Path, tmp_path, capsys):
    folder = tmp_path / "case"
    shutil.copytree(stopped, folder)
    run, saved, ledger = (str(folder / name) for name in ("run", "run.checkpoint", "ledger"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    resumed = ("--resume", run, "--ledger", ledger)

    (toml := tmp_path / "run.toml").write_text("epochs = 3")
    for words in (("--lr", "1"), ("--overwrite",), ("--out", "x"), ("--config", str(toml)), ("--epochs", "3")):
        assert f"{words[0]}: must be left out" in refused(capsys, *resumed, *words)
    assert "already has a run; continue it (dpcore train --resume" in refused(capsys, *RUN, "--out", run)
    assert "has no run of dpcore train" in refused(capsys, "--resume", str(folder))
    assert "run': is complete" in refused(capsys, "--resume", str(straight / "run"))

    other = tmp_path / "other"
    Ledger.create(other)
    assert "is not the one that pays for this run" in refused(capsys, "--resume", run, "--ledger", str(other))
    assert "does not exist" in refused(capsys, "--resume", run, "--ledger", str(tmp_path / "none"))
    exported = json.loads(json.dumps(Ledger.open(ledger).export()))
    begun = {name: exported[name][:1] for name in ("entries", "seals")}
    restored(tmp_path / "older", {**exported, **begun})
    assert "is a copy from before this run" in refused(capsys, "--resume", run, "--ledger", str(tmp_path / "older"))

    config = Path(run, "config.json")
    changed = json.loads(config.read_text())
    changed["settings"]["lr"] = 0.25
    config.write_text(json.dumps(changed))
    assert "its lr is 0.25, and the run has 0.5; put it back" in refused(capsys, *resumed)
    changed["settings"] |= {"lr": 0.5, "precision": "bf16"}
    config.write_text(json.dumps(changed))
    assert "its precision is 'bf16', and the run has 'float32'; put it back" in refused(capsys, *resumed)
    config.write_bytes(before[config])

    stated = Path(run, "statement.json")
    changed = json.loads(stated.read_text())
    changed["ledger"]["run"] = "another"
    stated.write_text(json.dumps(changed))
    assert "belongs to another run" in refused(capsys, *resumed)
    stated.write_bytes(before[stated])

    content = bytearray(before[Path(saved)])
    key = training.read_checkpoint(Path(saved))["optimizer"]["dpcore"]["secret"]["noise_key"].encode()
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
        assert "another command is using it" in refused(capsys, *resumed)
        assert "another command is using it" in refused(capsys, *RUN, "--out", run, "--overwrite")
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_ledger_that_was_moved_is_asked_for(stopped: Path, straight: Path, tmp_path, capsys):
    folder = tmp_path / "case"
    shutil.copytree(stopped, folder)
    saved = training.read_checkpoint(folder / "run.checkpoint")
    del saved["settings"]["precision"]  # as of a checkpoint from before there was a choice
    save_state(folder / "run.checkpoint", {**saved, "ledger": str(folder / "gone")})
    assert "say where it is now with --ledger FILE" in refused(capsys, "--resume", str(folder / "run"))
    assert resume(folder, "--ledger", str(folder / "ledger"), stop=40)[0] == 130
    assert resume(folder)[0] == 0, "the new place is remembered"
    assert_complete(folder, straight, 0)


def test_a_run_without_a_ledger_keeps_no_checkpoint(tmp_path, capsys):
    status, told = command(tmp_path, "--epsilon", "1", "--epochs", "2", "--out", str(tmp_path / "run"), stop=30)
    assert (status, "to continue" in told) == (130, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "told"]
    assert "has no checkpoint: only a run with --ledger keeps one" in refused(capsys, "--resume", str(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_without_guarantee_goes_on_too(tmp_path):
    """Its epsilon is infinite, which a checkpoint has to hold, too."""
    folder = tmp_path / "case"
    folder.mkdir()
    Ledger.create(folder / "ledger")
    words = ("--noise-multiplier", "0", "--epochs", "2", "--ledger", str(folder / "ledger"))
    status, told = command(folder, *words, "--out", str(folder / "run"), stop=30)
    assert status == 130, told
    assert resume(folder)[0] == 0
    assert [line["epsilon"] for line in lines(folder)] == ["inf"] * 3
