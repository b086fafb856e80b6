"""`dpcore epsilon --opacus` and `dpcore delta --opacus`: what a run of Opacus cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from dpcore.cli import main

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def said(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert main([*map(str, arguments)]) == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def test_a_checkpoint_and_its_history_in_json_say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    pytest.importorskip("torch")
    history = tmp_path / "history.json"
    history.write_text(json.dumps(json.loads((GOLDEN / "opacus.json").read_text())["prv"]))
    told = [
        json.loads(said(capsys, "epsilon", "--opacus", file, "--delta", 1e-5, "--json"))
        for file in (GOLDEN / "opacus-prv.pt", history)
    ]
    assert told[0] == told[1]
    assert told[0]["interval"][0] <= told[0]["epsilon"] == pytest.approx(2.3375, abs=1e-3)
    assert told[0]["event"] == {
        "event": "PoissonSampledGaussian",
        "sample_rate": 0.05,
        "noise_multiplier": 1.1,
        "steps": 60,
    }
    assert "poisson_sampling=False" in told[0]["holds_if"][0]
    # The same plan by its options costs the same.
    plan = [
        "epsilon",
        "--sample-rate",
        "0.05",
        "--noise-multiplier",
        "1.1",
        "--steps",
        "60",
        "--delta",
        "1e-5",
        "--json",
    ]
    assert json.loads(said(capsys, *plan))["epsilon"] == told[0]["epsilon"]
    back = json.loads(said(capsys, "delta", "--opacus", history, "--epsilon", told[0]["epsilon"], "--json"))
    assert back["delta"] <= 1.003e-5


def test_what_a_person_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    history = tmp_path / "gdp.json"
    history.write_text(json.dumps(json.loads((GOLDEN / "opacus.json").read_text())["gdp"]))
    text = said(capsys, "epsilon", "--opacus", history, "--delta", 1e-5)
    assert "epsilon = 6.24" in text
    assert "certified: " in text
    assert "gdp accountant approximates" in text
    assert "It holds if:\n  - Batches were drawn by Poisson sampling" in text
    assert max(map(len, text.partition("It holds if:")[2].splitlines())) <= 80
    history.write_text(json.dumps({"history": [[1.0, 0.1, 3], [2.0, 0.1, 4]], "mechanism": "rdp"}))
    text = said(capsys, "epsilon", "--opacus", history, "--delta", 1e-5)
    assert "7 steps in 2 phases" in text
    assert "approximates" not in text


def test_json_needs_no_torch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "dpcore.torch.opacus", None)
    history = tmp_path / "history.json"
    history.write_text(json.dumps({"history": [[1.0, 0.1, 3]], "mechanism": "prv"}))
    assert "epsilon = " in said(capsys, "epsilon", "--opacus", history, "--delta", 1e-5)
    line = "epsilon", "--opacus", GOLDEN / "opacus-prv.pt", "--delta", 1e-5
    assert "needs torch; install it with: pip install 'dpcore[torch]'" in said(capsys, *line, status=2)


def test_what_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    history = tmp_path / "history.json"
    for text, words in {
        '{"history": []}': "history.json: history=[]: Opacus recorded no step",
        '{"history": [[1, 2, 3]]}': "history.json: history[0]: sample_rate=2: ",
        '{"history": [[1, 0.1, 1e400]]}': "history.json: is not JSON",
        '{"noise": 1}': "history.json: must be an Opacus accountant's state_dict()",
        "[1]": "history.json: must be an Opacus",
        "": "history.json: cannot be read",
        "{": "history.json: is not JSON",
    }.items():
        history.write_text(text)
        assert words in said(capsys, "epsilon", "--opacus", history, "--delta", 1e-5, status=2)
    for plan in ("--steps 3", "--sample-rate 0.1", "--sampling fixed-size", "--noise-multiplier 1"):
        line = "epsilon", "--opacus", history, "--delta", 1e-5, *plan.split()
        assert f"leave out {plan.split()[0]}" in said(capsys, *line, status=2)
    assert "No such file" in said(capsys, "delta", "--opacus", tmp_path / "no", "--epsilon", 1, status=2)
