"""Ctrl-C, SIGTERM and a plain kill: the folder stays readable and never states less than was spent."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpcore import accounting
from dpcore.cli import datasets, main
from dpcore.statement import Statement
from dpcore.torch import PrivateRun
from tests.depth import nightly
from tests.fresh import python

EPOCHS = 2000
PATIENCE = 1800  # seconds, on whatever machine; what takes so long hangs
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a run; none is left when the test ends, however it does."""
    begun: list[subprocess.Popen[str]] = []

    def begin(out: Path, *more: str) -> subprocess.Popen[str]:
        begun.append(_start(out, *more))
        return begun[-1]

    yield begin
    for process in begun:
        if process.poll() is None:
            process.kill()
            process.communicate()


def _start(out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dpcore", "train", "--noise-multiplier", "2", "--epochs", str(EPOCHS)]
    environment = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(
        [*command, "--out", str(out), *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def wait_for_metrics(process: subprocess.Popen[str], out: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def read(out: Path, killed: bool = False) -> tuple[Statement, list[dict[str, float]]]:
    statement = Statement.from_json((out / "statement.json").read_text())
    # The text is written first: a kill can fall between the two.
    assert killed or (out / "statement.txt").read_text() == statement.text()
    return statement, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), pytest.param(signal.SIGTERM, "SIGTERM", marks=nightly)]
)
def test_a_signal_ends_the_run_with_a_true_statement(number: signal.Signals, name: str, tmp_path, start: Start):
    out = tmp_path / "run"
    process = start(out, "--json")
    wait_for_metrics(process, out)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    statement, lines = read(out)
    told = json.loads(printed)
    assert told["status"] == f"stopped by {name}"
    assert told["statement"] == statement.to_dict()
    assert 0 < statement.steps_taken < statement.steps_planned == 23 * EPOCHS
    assert lines[-1]["step"] == statement.steps_taken
    event = accounting.Event.from_dict(statement.event)
    assert isinstance(event, accounting.PoissonSampledGaussian)
    assert event.steps == statement.steps_taken
    assert statement.epsilon["pld"] == accounting.epsilon(event, 1e-5) < statement.epsilon_planned["pld"]
    assert f"Stopped by {name}" in statement.note
    assert (out / "model.safetensors").exists()
    assert (out / "README.md").exists()


@pytest.mark.slow
def test_a_killed_run_states_at_least_what_was_spent(tmp_path, start: Start):
    out = tmp_path / "run"
    process = start(out)
    wait_for_metrics(process, out)
    process.kill()
    process.communicate(timeout=PATIENCE)
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
