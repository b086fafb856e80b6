"""`dpcore demo`: every method at one guarantee, and a verdict that does not claim more than the runs show."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("torch")
pytest.importorskip("matplotlib")
from dpcore.cli import main
from dpcore.cli.compare import demo
from dpcore.statement import Statement


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {name: replace(item, model="logistic", epochs=1) for name, item in demo.CONTESTANTS.items()}
    monkeypatch.setattr(demo, "CONTESTANTS", short)


@pytest.mark.slow
def test_it_ends_with_a_table_a_picture_and_the_guarantee(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out), "--seeds", "2"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "DP-SGD",
        "DOPPLER",
        "DiSK",
        "±",
        "comparison.png",
    ):
        assert part in printed
    # Calibrated to epsilon = 1: at most that, and not by more than PLD resolves.
    (stated,) = re.findall(r"Guarantee of each run: \((.+), 1e-5\)-differential privacy", printed)
    assert 0.999 <= float(stated) <= 1
    results = json.loads((out / "results.json").read_text())["methods"]
    statements = {
        name: Statement.from_dict(item) for name, item in json.loads((out / "statement.json").read_text()).items()
    }
    assert list(results) == list(statements) == ["DP-SGD", "DOPPLER", "DiSK"]
    # The same guarantee, sampler and noise for all: only the methods differ.
    for name in ("epsilon", "sampler", "noise", "delta", "steps_taken", "adjacency"):
        assert len({json.dumps(getattr(item, name), sort_keys=True) for item in statements.values()}) == 1
    assert 0.99 < results["DiSK"]["epsilon"] <= 1
    for item in results.values():
        assert item["mean"] == pytest.approx(np.mean(item["test_accuracy"]))
        assert item["standard_error"] == pytest.approx(np.std(item["test_accuracy"], ddof=1) / 2**0.5)
    assert (out / "comparison.png").stat().st_size > 10_000
    # Run again: the folder of a demo is replaced, since a demo is there to be repeated.
    assert main(["demo", "--out", str(out), "--seeds", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seeds"] == 1
    assert told["methods"]["DiSK"]["standard_error"] is None


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["demo", "--out", str(tmp_path), "--seeds", "1"]) == 2
    assert "holds no dpcore demo" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("base", "other", "words"),
    [
        ([0.90, 0.91, 0.89], [0.80, 0.82, 0.81], "The papers' ordering does not show"),
        ([0.90, 0.91, 0.89], [0.80, 0.82, 0.81], "DP-SGD came out 9.00 points above DiSK, more than two"),
        (
            [0.80, 0.90, 0.70],
            [0.81, 0.91, 0.71],
            "1.00 points above DP-SGD, less than two standard errors of the difference (2 x 8.16), so it may be luck",
        ),
        ([0.80, 0.81, 0.79], [0.90, 0.91, 0.89], "more than two standard errors"),
        ([0.80], [0.90], "one seed cannot tell luck from merit"),
    ],
)
def test_the_verdict_claims_what_the_runs_show(base: list[float], other: list[float], words: str) -> None:
    series = {
        name: demo.Series(np.array(finals)[:, None], None) for name, finals in (("DP-SGD", base), ("DiSK", other))
    }  # type: ignore[arg-type]
    assert words in demo._verdict(series)
