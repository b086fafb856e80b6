"""`dpcore audit` and `dpcore doctor`: methods, and a user's own script."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from dpcore import accounting
from dpcore.accounting import Adjacency, Gaussian
from dpcore.audit import auditing
from dpcore.cli import main
from dpcore.mechanism.mechanism import Mechanism
from tests.end_to_end.command_line import say

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
    assert "were recognized as if" in told


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


# `dpcore doctor` and `dpcore audit` on a user's own script: what is run, what is said, and the exit status.


SCRIPT = """
import sys
import torch
import dpcore
{imported}

print("this script says something")
torch.manual_seed(0)
data = torch.randn(60, 6), torch.randint(3, (60,))
layer = torch.nn.BatchNorm1d(8) if "--broken" in sys.argv else torch.nn.Tanh()
model = torch.nn.Sequential(torch.nn.Linear(6, 8), layer, torch.nn.Linear(8, 3))
method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=10)
try:
    private = {call}(model, data, method, steps=30, target_delta=1e-5, ledger="never-made.ledger")
except Exception:
    print("swallowed")
open("trained", "w").close()
"""

FUNCTIONS = """
import torch
import dpcore
import dpcore.torch

def tuple_of_objects():
    return torch.nn.Linear(6, 3), (torch.randn(40, 6), torch.randint(3, (40,)))

def dict_of_objects():
    model = torch.nn.Linear(6, 3)
    data = torch.randn(40, 6), torch.randint(3, (40,))
    method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=10)
    return {"model": model, "data": data, "method": method, "params": [model.weight], "steps": 5}

def calls_make_private():
    return dpcore.torch.make_private(*tuple_of_objects(), None, steps=5)

def number():
    return 3

def fails():
    raise KeyError("patients.csv")
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    first = {"imported": "import dpcore.torch", "call": "dpcore.torch.make_private"}
    second = {"imported": "from dpcore.torch import make_private", "call": "make_private"}
    third = {"imported": "from dpcore.torch.make_private import make_private", "call": "make_private"}
    for name, words in {"first.py": first, "second.py": second, "third.py": third}.items():
        (tmp_path / name).write_text(SCRIPT.format(**words))
    (tmp_path / "objects.py").write_text(FUNCTIONS)
    (tmp_path / "idle.py").write_text("print('nothing')")
    return tmp_path


@pytest.mark.parametrize("name", ["first.py", "second.py", "third.py"])
def test_a_script_is_run_up_to_its_call_of_make_private(scripts, capsys, name):
    from dpcore.torch import make_private

    before = sys.argv, list(sys.path), sys.modules["__main__"]
    told = say(capsys, ["doctor", name, "--no-audit"])
    assert "ok         plan: 30 steps of about 10 of 60 examples" in told.out
    assert "this script says something" in told.err
    assert "this script says something" not in told.out
    assert not (scripts / "trained").exists()
    assert not (scripts / "never-made.ledger").exists()
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
    import dpcore.torch

    assert dpcore.torch.make_private is make_private


def test_a_fault_is_exit_status_1_and_json(scripts, capsys):
    told = json.loads(say(capsys, ["doctor", "first.py", "--no-audit", "--json", "--", "--broken"], status=1).out)
    assert not told["ok"]
    fault = next(finding for finding in told["findings"] if finding["status"] == "fault")
    assert fault["name"] == "layers"
    assert "BatchNorm1d" in fault["sentence"]
    assert "GroupNorm" in fault["remedy"]


def test_a_function_gives_the_objects(scripts, capsys):
    assert "no method was given" in say(capsys, ["doctor", "objects.py:tuple_of_objects", "--no-audit"]).out
    assert "is in no group" in say(capsys, ["doctor", "objects.py:dict_of_objects", "--no-audit"], status=1).out
    assert "examples" in say(capsys, ["doctor", "objects.py:calls_make_private", "--no-audit"]).out


def test_an_own_run_is_audited(scripts, capsys):
    text = " ".join(say(capsys, ["audit", "first.py", "--seconds", "30"]).out.split())
    found = re.search(r"claimed epsilon (\S+) at delta 1e-05; lower bound (\S+) at", text)
    assert found
    assert 0 < float(found[2]) < float(found[1])
    assert "proves no privacy" in text
    told = json.loads(say(capsys, ["audit", "first.py", "--json", "--seconds", "0.1"]).out)
    assert told["claimed_epsilon"] == pytest.approx(float(found[1]), abs=1e-3)


def test_a_refused_run_is_not_audited(scripts, capsys):
    assert "BatchNorm1d" in say(capsys, ["audit", "first.py", "--", "--broken"], status=2).err


@pytest.mark.parametrize(("place", "told"), [
    ("nothing.py", "nothing.py: there is no such file"),
    ("nothing", "must be a file that ends in .py, or FILE.py:FUNCTION"),
    ("objects.py:walk", "has no function 'walk'"),
    ("objects.py:number", "must return (model, data, method, loss)"),
    ("objects.py:fails", "ends with KeyError ('patients.csv') before it gives a run"),
    ("idle.py", "never calls dpcore.torch.make_private"),
])  # fmt: skip
def test_bad_input_of_the_doctor_is_one_sentence(scripts, capsys, place, told):
    said = say(capsys, ["doctor", place], status=2).err
    assert told in said
    assert "Traceback" not in said
