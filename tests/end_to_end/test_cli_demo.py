"""`dpcore demo`: a comparison with fixed settings."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("torch")
pytest.importorskip("matplotlib")
from dpcore.cli import main
from dpcore.cli.compare import compare as demo
from dpcore.statement import Statement
from tests.end_to_end.command_line import say


@pytest.mark.slow
def test_it_ends_with_a_table_a_picture_and_the_guarantee(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "COMMON", {**demo.COMMON, "model": "logistic", "epochs": 1})
    out = tmp_path / "demo"
    printed = say(capsys, ["demo", "--out", str(out), "--seeds", "2"]).out
    for part in ("DP-SGD", "DOPPLER", "DiSK", "±", "comparison.png", "Tuning is NOT accounted for"):
        assert part in printed
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert [run["contestant"] for run in runs] == ["DP-SGD"] * 2 + ["DOPPLER"] * 2 + ["DiSK"] * 2
    statements = [Statement.from_json((out / run["folder"] / "statement.json").read_text()) for run in runs]
    # The same guarantee, sampler and noise for all: only the methods differ.
    for name in ("epsilon", "sampler", "noise", "delta", "steps_taken", "adjacency"):
        assert len({json.dumps(getattr(item, name), sort_keys=True) for item in statements}) == 1
    assert 0.999 < statements[0].best_epsilon <= 1
    assert (out / "comparison.png").stat().st_size > 10_000
    # The same command keeps what is made; with --overwrite it begins anew.
    assert "6 of 6 runs were made before" in say(capsys, ["demo", "--out", str(out), "--seeds", "2", "--json"]).err
    assert main(["demo", "--out", str(out), "--seeds", "1", "--overwrite"]) == 0
    assert len(json.loads((out / "results.json").read_text())["runs"]) == 3


def test_its_settings_are_those_of_the_documentation():
    assert [(item.name, item.lr) for item in demo.CONTESTANTS] == [
        ("DP-SGD", (0.35,)),
        ("DOPPLER", (0.7,)),
        ("DiSK", (0.35,)),
    ]
    asked = demo.Comparison(demo.CONTESTANTS, (1.0,), demo.COMMON)
    settings = [asked.settings_for(asked.final(item.name, 1.0, item.lr[0])[0]) for item in demo.CONTESTANTS]
    same = {replace(item, method="dp_sgd", lr=None) for item in settings}
    assert len(same) == 1
    (one,) = same
    assert (one.data, one.model, one.epochs, one.batch_size, one.delta) == ("digits", "mlp", 10, 64, 1e-5)
