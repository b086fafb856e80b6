"""`dpcore audit`: the claim, the bound and the verdict, for people and for machines."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("typer")
from dpcore import accounting
from dpcore.accounting import Adjacency, Gaussian
from dpcore.audit import auditing
from dpcore.cli import main
from dpcore.mechanism.mechanism import Mechanism

SMALL = ["--dataset-size", "100", "--batch-size", "25", "--steps", "4", "--runs", "4"]


@pytest.fixture(autouse=True)
def _one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """An honest method is flagged once in a hundred times, as the audit says; not now and then in these tests."""
    monkeypatch.setattr(auditing, "new_key", lambda: bytes(range(32)))


def test_an_honest_method_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--method", "disk", "--sampling", "fixed-order", *SMALL]) == 0
    told = capsys.readouterr().out
    assert "; lower bound " in told
    assert "proves no privacy" in told
    assert "FLAGGED" not in told


def test_json_is_the_claim_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--sampling", "full-batch", "--noise-multiplier", "3", *SMALL, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    expected = accounting.epsilon(Gaussian(3.0, 4, Adjacency.ZERO_OUT), 1e-5, "gaussian")
    assert told["claimed_epsilon"] == pytest.approx(expected)
    assert told["lower_bound"] < expected
    assert told["settings"]["name"] == "dp_sgd"


def test_noise_is_calibrated_to_a_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--method", "memf", "--epsilon", "1.5", *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["claimed_epsilon"] == pytest.approx(1.5, rel=1e-6)


def test_a_refuted_claim_is_exit_status_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    add = Mechanism.add

    def many_times(self: Mechanism, rows: Any) -> None:
        for _ in range(20):
            add(self, rows)

    monkeypatch.setattr(Mechanism, "add", many_times)
    assert main(["audit", "--sampling", "fixed-order", *SMALL]) == 1
    told = capsys.readouterr().out
    assert "FLAGGED" in told
    assert "told apart" in told


@pytest.mark.parametrize(("options", "message"), [
    (["--method", "memf", "--sampling", "poisson"], "correlated noise"),
    (["--groups", "3"], "only for --sampling cyclic-poisson"), (["--sampling", "cyclic-poisson"], "give --groups"),
    (["--confidence", "1"], "confidence=1.0"), (["--canaries", "1", "--runs", "3"], "at least 64"),
    (["--steps", "0"], "steps=0"), (["--noise-multiplier", "0"], "claims nothing"),
    (["--epsilon", "1", "--noise-multiplier", "1"], "must not be given with --epsilon"),
    (["--method", "dsk"], "did you mean disk"),
])  # fmt: skip
def test_bad_input_is_one_sentence(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
