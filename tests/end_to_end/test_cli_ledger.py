"""`dpcore ledger` says what the ledger says, as text and as JSON, and refuses nonsense in one sentence."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from dpcore.accounting import Gaussian, PoissonSampledGaussian
from dpcore.cli import main
from dpcore.ledger import Ledger, storage
from tests.end_to_end.command_line import ask, say
from tests.unit.ledger_tools import restored


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def used() -> Ledger:
    ledger = Ledger.create("people.ledger", budget=(3, 1e-5), name="patients")
    ledger.charge(PoissonSampledGaussian(0.01, 1.0, 500), name="first [try]")
    ledger.charge(Gaussian(6.0), name="a count")
    return ledger


def test_create(capsys):
    words = ["create", "people.ledger", "--budget-epsilon", "3", "--budget-delta", "1e-5", "--name", "patients"]
    told = ask("ledger", *words)
    assert (told["budget"], told["name"]) == ({"epsilon": 3, "delta": 1e-5}, "patients")
    made = Ledger.open("people.ledger")
    assert (made.ledger_id, made.budget, made.order) == (told["ledger"], (3, 1e-5), None)
    assert told["order"] is None
    assert main(["ledger", "create", "other.ledger"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "budget  none; Renyi filter, whose order the first row fixes"


def test_accepting_a_file_system(capsys, monkeypatch):
    moved = used()
    monkeypatch.setattr(storage, "file_system", lambda path: ("tmpfs", "/here"))
    monkeypatch.setattr(storage, "KNOWN", storage.KNOWN - {"tmpfs"})
    for words in (("create", "new.ledger"), ("verify", moved.path)):
        assert "--accept-file-system" in say(capsys, ["ledger", *map(str, words)], 2).err
        ask("ledger", *words, "--accept-file-system")
        assert ask("ledger", "verify", words[1])["valid"]
        assert ask("ledger", "show", words[1], "--delta", "1e-5")["file_systems"] == ["tmpfs"]
        assert main(["ledger", "show", str(words[1]), "--delta", "1e-5"]) == 0
        assert "is on tmpfs, which its owner accepted" in capsys.readouterr().out


def test_show(capsys):
    ledger = used()
    told, total = ask("ledger", "show", "people.ledger"), ledger.total()
    assert told["total"] == json.loads(json.dumps(total.to_dict()))
    assert [run["name"] for run in told["runs"]] == ["first [try]", "a count"]
    assert [run["epsilon"] for run in told["runs"]] == [run.epsilon(1e-5) for run in ledger.runs()]
    assert ask("ledger", "show", "people.ledger", "--delta", "1e-6")["total"]["fixed"] > total.fixed
    printed = say(capsys, ["ledger", "show", "people.ledger"]).out
    assert "\x1b" not in printed
    (line,) = [line for line in printed.splitlines() if "first [try]" in line]
    assert line.split()[-4:-1] == ["/", "1", "0"]
    spent = 100 * total.spent / total.limit
    first = f"Spent: {spent:.1f}% of a budget of epsilon = 3 at delta = 1e-5, by 2 runs; left: {100 - spent:.1f}%"
    assert printed.splitlines()[0] == f"{first}, or {ledger.remaining().runs(1.0)} more runs of epsilon = 1."
    assert "however they were chosen  " not in printed  # the budget holds for that
    assert "with all to come, however it is chosen   epsilon = 3 at delta = 1e-5, add-remove adjacency" in printed
    # The advice at the end can be typed, with numbers in the place of the capitals.
    advice = printed.splitlines()[-1].partition(" dpcore ")[2]
    for name, value in (("FILE", "people.ledger"), (" N ", " 60000 "), (" B ", " 256 "), (" E", " 1")):
        assert name in advice
        advice = advice.replace(name, value)
    assert "noise multiplier" in say(capsys, advice.split()).out


def test_verify(capsys):
    ledger = used()
    told = ask("ledger", "verify", "people.ledger")
    assert told == {"valid": True, "entries": 6, "seal": ledger.seal, "problems": []}
    assert ask("ledger", "verify", "people.ledger", "--seal", ledger.seal)["valid"]
    assert not ask("ledger", "verify", "people.ledger", "--seal", "x", status=2)["valid"]
    assert "NOT valid: 6 entries" in say(capsys, ["ledger", "verify", "people.ledger", "--seal", "x"], 2).out


def test_export_of_a_whole_and_of_a_damaged_ledger(capsys):
    ledger = used()
    told = ask("ledger", "export", "people.ledger")
    assert restored(Path("again.ledger"), told).runs() == ledger.runs()
    content = ledger.path.read_bytes()
    Path("torn").write_bytes(content[: len(content) // 2])
    rest = ask("ledger", "export", "torn", status=2)
    assert "is damaged" in rest["damaged"]
    assert all(item in told["entries"] for item in rest["entries"])
    assert rest["entries"]
    assert Path("torn").read_bytes() == content[: len(content) // 2]


def test_a_copy_that_cannot_be_written_can_be_looked_at(capsys, monkeypatch):
    used()
    allowed = os.access
    # Root may write everywhere, whatever the mode says.
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK and allowed(path, mode))
    assert ask("ledger", "show", "people.ledger")["total"]["runs"] == 2
    assert ask("ledger", "verify", "people.ledger")["valid"]


def test_a_plan_beyond_the_budget_is_told_before_it_is_begun(capsys):
    pytest.importorskip("torch")
    Ledger.create("people.ledger", budget=(3, 1e-5))
    words = ["train", "--data", "digits", "--model", "logistic", "--delta", "1e-5", "--epochs", "1"]
    assert main([*words, "--epsilon", "4", "--ledger", "people.ledger", "--out", "a"]) == 3
    assert "does not pay for all 23 steps; training stops before it is crossed" in capsys.readouterr().err
    Ledger.create("other.ledger", budget=(3, 1e-5))
    assert "does not pay" not in say(capsys, [*words, "--epsilon", "1", "--ledger", "other.ledger", "--out", "b"]).err


def test_a_ledger_of_other_data_is_told_before_the_first_step(capsys):
    pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    inputs, targets = generator.random((40, 8), dtype=np.float32), np.arange(40) % 2
    np.savez("own.npz", x_train=inputs, y_train=targets, x_test=inputs[:9], y_test=targets[:9])
    words = ["--model", "logistic", "--epsilon", "1", "--epochs", "1", "--ledger", "people.ledger", "--out"]
    own = ["--data", "own", "--data-dir", ".", "--batch-size", "8", "--delta", "1e-3"]
    compared = ["compare", *own, "--methods", "dp_sgd", "--seeds", "1"]
    for command in (["train", *own, *words, "c"], [*compared, *words, "d"]):
        ledger = Ledger.create("people.ledger")
        for number in range(2 if command[0] == "train" else 1):
            told = say(capsys, ["train", *words, f"{number} before {command[0]}", "--batch-size", "256"]).err
            assert "fingerprint" not in told
        said = " ".join(say(capsys, command).err.split())
        (note,) = (note for note in Ledger.open("people.ledger").total(1e-5).notes if "fingerprints" in note)
        assert f"remark: ledger='{ledger.path}': {note}" in said
        assert said.index("fingerprints") < said.index("held-out accuracy" if "compare" in command else "epoch 1")
        Path("people.ledger").unlink()


def test_charging_what_happened_without_the_ledger(capsys):
    pytest.importorskip("torch")
    words = ["train", "--model", "logistic", "--epsilon", "2", "--epochs", "1", "--batch-size", "256", "--out"]
    say(capsys, [*words, "old"])
    Ledger.create("people.ledger", budget=(3, 1e-5))
    told = ask("ledger", "charge", "people.ledger", "--statement", "old", "--name", "before")
    (run,) = Ledger.open("people.ledger").runs()
    assert (run.run_id, run.name, run.releases) == (told["run"], "before", 1)
    assert 1.99 < told["total"]["fixed"] <= 2
    charge = ["ledger", "charge", "people.ledger", "--name", "x"]
    assert "was charged for it before" in say(capsys, [*charge, "--statement", "old"], 2).err
    say(capsys, [*words, "large", "--epsilon", "8"])
    assert "add --already-released" in say(capsys, [*charge, "--statement", "large"], 2).err
    assert len(Ledger.open("people.ledger").runs()) == 1
    printed = say(capsys, [*charge, "--statement", "large", "--already-released"]).out
    assert "left: 0.0%" in printed
    assert "note: The budget is exceeded" in say(capsys, ["ledger", "show", "people.ledger"]).out
    assert "would cross the budget" in say(capsys, [*words, "next", "--ledger", "people.ledger"], 2).err

    Ledger.create("other.ledger")
    say(capsys, [*words, "paid", "--ledger", "other.ledger"])
    charge[2] = "other.ledger"
    assert "this ledger paid for it, as its run" in say(capsys, [*charge, "--statement", "paid"], 2).err
    assert "give one of the two" in say(capsys, charge, 2).err
    assert "must name the release" in say(capsys, [*charge[:3], "--statement", "old"], 2).err
    history = {"history": [[1.0, 0.01, 100]], "mechanism": "rdp"}
    Path("opacus.json").write_text(json.dumps(history))
    say(capsys, [*charge, "--opacus", "opacus.json"])
    assert Ledger.open("other.ledger").runs()[-1].event == PoissonSampledGaussian(0.01, 1.0, 100)
