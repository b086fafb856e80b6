"""A command that computes for long says so once, on standard error, within a second of its first work."""

from __future__ import annotations

import inspect
import json
import threading
from importlib import import_module

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
import typer

from dpcore.cli import app, main, output

PLAN = ["--sample-rate", "1e-4", "--steps", "1e9"]


def test_half_a_second_goes_by_before_a_word(capsys, monkeypatch):
    assert 0 < output._PATIENCE <= 0.5
    monkeypatch.setattr(output, "_PATIENCE", 0.01)
    said = threading.Event()
    monkeypatch.setattr(output, "fitted", lambda text, _: said.set() or text)
    with output.told_if_slow("the sum"):
        assert said.wait(60)
    assert capsys.readouterr().err == "remark: still computing: the sum; Ctrl-C stops it\n"
    monkeypatch.setattr(output, "_PATIENCE", 60.0)
    with output.told_if_slow("the sum"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [
        ["epsilon", *PLAN, "--noise-multiplier", "3", "--delta", "1e-6"],
        ["delta", *PLAN, "--noise-multiplier", "3", "--epsilon", "1"],
        ["calibrate", *PLAN, "--epsilon", "3", "--delta", "1e-6"],
        ["curve", "steps", *PLAN, "--noise-multiplier", "3", "--delta", "1e-6"],
    ],
)
def test_what_takes_long_is_named_once_and_json_stays_pure(words: list[str], capsys, monkeypatch):
    """The computation itself is replaced: what is tested is the line, and not the machine."""
    from dpcore import accounting

    monkeypatch.setattr(output, "_PATIENCE", 0.01)
    said = threading.Event()
    monkeypatch.setattr(output, "fitted", lambda text, _: said.set() or text)

    def wait_and(value: float):
        def found(*_: object, **__: object) -> float:
            assert said.wait(60)
            return value

        return found

    for name in ("epsilon", "delta"):
        monkeypatch.setattr(accounting, name, wait_and(1.0))
    for name in ("epsilon_interval", "delta_interval"):
        monkeypatch.setattr(accounting, name, wait_and(accounting.Interval(1.0, 1.0)))
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    lines = [line for line in err.splitlines() if "still computing" in line]
    assert len(lines) == 1
    assert lines[0].startswith("remark: still computing: certified bounds on the privacy loss; ")


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_that_takes_a_plan_tells(name: str):
    place, _, _ = app._COMMANDS[name]
    module, _, attribute = place.partition(":")
    found = getattr(import_module(module), attribute)
    if module.startswith("dpcore.cli.accounting") and not isinstance(found, typer.Typer):
        assert "sample_rate" in inspect.signature(found).parameters
        assert hasattr(found, "__wrapped__")
