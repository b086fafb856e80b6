"""Ctrl-C, SIGTERM and a plain kill: the folder stays readable and never states less than was spent."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpcore import accounting
from dpcore.cli import datasets, main
from dpcore.statement import Statement
from dpcore.torch import PrivateRun
from tests.end_to_end.command_line import forked
from tests.fresh import python

EPOCHS = 2000
PATIENCE = 1800  # seconds, on whatever machine; what takes so long hangs
RUN = ("train", "--noise-multiplier", "2", "--epochs", str(EPOCHS))
Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a run and waits for its second epoch; none is left when the test ends, however it does."""
    begun: list[Any] = []

    def begin(*more: str) -> Any:
        run = tmp_path / "run"
        begun.append(process := forked((*RUN, "--out", str(run), *more), tmp_path / "out", tmp_path / "err"))
        deadline = time.monotonic() + PATIENCE
        while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 2:
            assert process.is_alive(), (tmp_path / "err").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.join()


def read(out: Path, killed: bool = False) -> tuple[Statement, list[dict[str, float]]]:
    statement = Statement.from_json((out / "statement.json").read_text())
    # The text is written first: a kill can fall between the two.
    assert killed or (out / "statement.txt").read_text() == statement.text()
    return statement, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# First, so that the forks of the next need not import what a run does.
def test_a_second_signal_stops_in_mid_step_and_leaves_an_upper_bound(tmp_path, capsys, monkeypatch):
    step, taken = PrivateRun.step, []

    def stuck(run: PrivateRun, batch: object) -> None:
        step(run, batch)
        taken.append(run.steps_taken)
        if len(taken) == 30:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    monkeypatch.setattr(PrivateRun, "step", stuck)
    assert main(["train", "--epsilon", "3", "--epochs", "4", "--out", str(tmp_path / "run")]) == 130
    assert "stopped at once, in the middle of a step; " in (printed := capsys.readouterr().err)
    assert "states an upper bound" in printed
    statement, lines = read(tmp_path / "run")
    assert len(lines) == 1
    assert statement.steps_taken == 46 >= len(taken)


def test_a_signal_ends_the_run_with_a_true_statement(tmp_path, start: Start):
    """Ctrl-C; SIGTERM in test_cli_resume.py."""
    out, process = tmp_path / "run", start("--json")
    os.kill(process.pid, signal.SIGINT)
    process.join(PATIENCE)
    errors = (tmp_path / "err").read_text()
    assert process.exitcode == 130, errors
    assert "Traceback" not in errors
    statement, lines = read(out)
    told = json.loads((tmp_path / "out").read_text())
    assert told["status"] == "stopped by Ctrl-C"
    assert told["statement"] == statement.to_dict()
    assert 0 < statement.steps_taken < statement.steps_planned == 23 * EPOCHS
    assert lines[-1]["step"] == statement.steps_taken
    event = accounting.Event.from_dict(statement.event)
    assert isinstance(event, accounting.PoissonSampledGaussian)
    assert event.steps == statement.steps_taken
    assert statement.epsilon["pld"] == accounting.epsilon(event, 1e-5) < statement.epsilon_planned["pld"]
    assert "Stopped by Ctrl-C" in statement.note
    assert (out / "model.safetensors").exists()
    assert (out / "README.md").exists()


def test_a_killed_run_states_at_least_what_was_spent(tmp_path, start: Start):
    out, process = tmp_path / "run", start()
    process.kill()
    process.join(PATIENCE)
    statement, lines = read(out, killed=True)
    assert statement.steps_taken >= lines[-1]["step"]
    assert "spent at most what is stated" in statement.note
    assert json.loads((out / "config.json").read_text())["settings"]["noise_multiplier"] == 2


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_before_the_first_step_leaves_nothing(
    number: signal.Signals, name: str, tmp_path, capsys, monkeypatch
):
    def load(*_: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr(datasets, "load", load)
    assert main(["train", "--epsilon", "3", "--out", str(tmp_path / "run")]) == 128 + number
    assert capsys.readouterr().err == f"dpcore: stopped by {name}; no private step was under way\n"
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_dpcore_is_imported_is_one_sentence():
    code = """
import os, signal, sys, time
import dpcore_command

class Stuck:
    def find_spec(self, name, path=None, target=None):
        if name == "dpcore":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(9)

sys.meta_path.insert(0, Stuck())
sys.exit(dpcore_command.main())
"""
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "dpcore: stopped by Ctrl-C; nothing was begun\n"
