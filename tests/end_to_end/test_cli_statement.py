"""`dpcore statement` and `dpcore verify`: what a run wrote, its files beside its statement, and nonsense."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpcore.accounting import Gaussian
from dpcore.cli import main
from dpcore.ledger import Ledger
from dpcore.statement import Statement
from dpcore.statement.verify import folder as checks
from dpcore.statement.verify import holds, verify
from tests.end_to_end.command_line import say

LINE = "train --data digits --model logistic --epsilon 3 --delta 1e-5 --epochs 1 --out"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folders")
    assert main([*LINE.split(), str(folder / "run")]) == 0
    assert main([*LINE.split(), str(folder / "other"), "--lr", "0.25"]) == 0
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "run", tmp_path / "run"))


def failed(capsys, folder: Path) -> dict[str, str]:
    found = json.loads(say(capsys, ["verify", str(folder), "--json"], 1).out)
    return {item["check"]: item["words"] for item in found["checks"] if item["status"] == "failed"}


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def swapped(*names: str) -> Callable[[Path, Path], None]:
    def forge(run: Path, runs: Path) -> None:
        for name in names:
            shutil.copy(runs / "other" / name, run / name)

    return forge


FORGED: dict[str, tuple[Callable[[Path, Path], None], str, str]] = {
    "text changed": (
        lambda run, _: replaced(run / "statement.txt", "epsilon", "EPSILON"),
        "statement.txt",
        "contradicts statement.json",
    ),
    "text gone": (lambda run, _: (run / "statement.txt").unlink(), "SHA-256 of statement.txt", "cannot be read"),
    "text and card gone": (
        lambda run, _: [(run / name).unlink() for name in ("statement.txt", "README.md")],
        "statement.txt",
        "statement.txt is missing",
    ),
    "card changed": (
        lambda run, _: replaced(run / "README.md", "guarantee    epsilon = ", "guarantee    epsilon = 0."),
        "README.md",
        "README.md contradicts statement.json",
    ),
    "epsilon in the title": (
        lambda run, _: replaced(run / "README.md", "\n# ", "\n# With epsilon = 0.5: "),
        "README.md",
        "README.md contradicts statement.json",
    ),
    "card without digests": (
        lambda run, _: (run / "README.md").write_text((run / "README.md").read_text().partition("## Files")[0]),
        "README.md",
        "lists no SHA-256",
    ),
    "card gone": (lambda run, _: (run / "README.md").unlink(), "README.md", "is missing, which lists the SHA-256"),
    "card of a file elsewhere": (
        lambda run, _: replaced(run / "README.md", "| `statement.txt` |", "| `../statement.txt` |"),
        "SHA-256",
        "which is not in its folder",
    ),
    "model swapped": (
        swapped("model.safetensors"),
        "SHA-256 of model.safetensors",
        "model.safetensors is not the file whose SHA-256",
    ),
    "model and card swapped": (
        swapped("model.safetensors", "README.md"),
        "SHA-256 of statement.json",
        "statement.json is not the file",
    ),
    "statement swapped": (swapped("statement.json"), "SHA-256 of statement.json", "statement.json is not the file"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_is_named(name: str, run: Path, runs: Path, capsys):
    forge, check, words = FORGED[name]
    forge(run, runs)
    found = failed(capsys, run)
    assert words in found[check]
    # The statement alone is what it was.
    assert main(["verify", str(run / "statement.json")]) == 0


def test_what_is_not_looked_at_is_named(run: Path, capsys):
    (run / "notes.md").write_text("mine")
    printed = " ".join(say(capsys, ["verify", str(run)]).out.split())
    assert "not checked: config.json, metrics.jsonl, notes.md" in printed
    (run / "metrics.jsonl").write_text("forged")
    assert main(["verify", str(run)]) == 0


def test_a_card_of_another_version_is_a_remark(run: Path, capsys, monkeypatch):
    monkeypatch.setattr(checks, "__version__", "9.9")
    replaced(run / "statement.txt", "Sampling", "Batches")
    replaced(run / "README.md", "## Privacy", "## The guarantee")
    found = json.loads(say(capsys, ["verify", str(run), "--json"], 1).out)["checks"]
    assert [item["check"] for item in found if item["status"] == "remark"] == ["README.md", "statement.txt"]
    # A digest has no other words, and neither has a guarantee.
    assert [item["check"] for item in found if item["status"] == "failed"] == ["SHA-256 of statement.txt"]
    replaced(run / "README.md", "guarantee    epsilon = ", "guarantee    epsilon = 0.")
    assert "README.md contradicts statement.json" in failed(capsys, run)["README.md"]


def test_a_run_that_was_resumed_and_killed_has_no_card(run: Path, capsys):
    content = json.loads((run / "statement.json").read_text())
    statement = Statement.unchecked(content | {"note": "Written before the steps of epoch 2"})
    (run / "statement.json").write_text(statement.to_json())
    (run / "statement.txt").write_text(statement.text())
    (run / "README.md").unlink()
    printed = " ".join(say(capsys, ["verify", str(run)]).out.split())
    assert "model.safetensors is of an earlier end of it" in printed
    assert "not checked: config.json, metrics.jsonl, model.safetensors" in printed


def test_a_folder_with_a_statement_that_cannot_be_read_is_no_traceback(run: Path, capsys):
    (run / "statement.json").write_text(json.dumps({"settings_hash": 1, "format": 3}))
    assert "form" in failed(capsys, run)


def test_a_statement_beside_its_ledger(tmp_path, capsys):
    file, run = tmp_path / "people.ledger", tmp_path / "run"
    Ledger.create(file, budget=(3, 1e-5))
    Ledger.create(tmp_path / "other")
    assert main([*LINE.split(), str(run), "--epsilon", "1", "--ledger", str(file)]) == 0
    words = ["verify", str(run), "--ledger"]
    printed = " ".join(say(capsys, [*words, str(file)]).out.split())
    for check in ("event ok equals", "event planned ok equals", "is an entry's", "not below that of this run"):
        assert check in printed
    other = " ".join(say(capsys, [*words, str(tmp_path / "other")], 1).out.split())
    assert f"is {Ledger.open(tmp_path / 'other').ledger_id}" in other
    whole = json.loads((run / "statement.json").read_text())

    def found(**changes: Any) -> dict[str, str]:
        (tmp_path / "changed.json").write_text(Statement.unchecked(whole | changes).to_json())
        line = ["verify", str(tmp_path / "changed.json"), "--ledger", str(file), "--json"]
        assert main(line) in (0, 1)
        checks = json.loads(capsys.readouterr().out)["checks"]
        return {item["check"]: f"{item['status']}: {item['words']}" for item in checks if "ledger" in item["check"]}

    total = whole["ledger"]["total"]
    for name in ("epsilon", "epsilon_if_fixed_beforehand"):
        less = found(ledger=whole["ledger"] | {"total": total | {name: 0.5}})
        assert "failed: epsilon = 0.5 for all runs is below epsilon = 0.9995" in less["ledger's total"]
    assert "is stated at" in found(ledger=whole["ledger"] | {"total": total | {"delta": 1e-3}})["ledger's total"]
    assert "cannot be read" in found(ledger=whole["ledger"] | {"total": 3})["ledger's total"]
    for name, label in (("epsilon", "epsilon"), ("epsilon_if_fixed_beforehand", "epsilon if fixed beforehand")):
        for factor, words in ((0.999, "failed: .*too little"), (1.001, "failed: .*more than follows"), (1, "ok: ")):
            other = found(ledger=whole["ledger"] | {"total": total | {name: factor * total[name]}})
            assert re.match(words, other[f"ledger: total, {label}"])
    # Later entries change nothing, and an earlier seal hides the run's own steps.
    ledger = Ledger.open(file)
    ledger.charge(Gaussian(30.0), name="later")
    assert not any(words.startswith("failed") for words in found().values())
    early = found(ledger=whole["ledger"] | {"seal": ledger.export()["seals"][1]})
    assert early["ledger: total"] == (
        "failed: the seal is of an entry before the last step of this run: it had 0 steps then"
    )
    assert (
        "no entry has the seal None"
        in found(ledger={k: v for k, v in whole["ledger"].items() if k != "seal"})["ledger: seal"]
    )
    short = found(ledger={name: whole["ledger"][name] for name in ("ledger", "run")})
    assert short.keys() == {"ledger", "ledger: event", "ledger: event planned"}
    assert "failed: no entry has" in found(ledger=whole["ledger"] | {"seal": "ab" * 32})["ledger: seal"]
    assert "has no run x" in found(ledger=whole["ledger"] | {"run": "x"})["ledger"]
    assert "names no ledger" in found(ledger={})["ledger"]
    assert "has 23 steps of this run, the statement 10" in found(steps_taken=10)["ledger: event"]
    abandoned = found(steps_abandoned=2)
    assert abandoned["ledger: event"] == "failed: the statement counts 25 steps, but the ledger paid for 23 steps"
    before = found(steps_abandoned=2, note="Written before the steps of epoch 1")
    assert before["ledger: event"].startswith("remark: the statement counts 25 steps before they were taken")
    quieter = whole["event"] | {"noise_multiplier": 9.0}
    assert "failed: differs from the ledger's" in found(event=quieter)["ledger: event"]
    assert "failed: differs from the ledger's" in found(event_planned=quieter)["ledger: event planned"]


# `dpcore statement` and `dpcore verify` on what a real run wrote, and on nonsense.


def changed(run: Path, folder: Path, **fields: Any) -> Path:
    content = json.loads((run / "statement.json").read_text()) | fields
    path = folder / "changed.json"
    path.write_text(json.dumps(content))
    return path


def test_a_run_writes_a_card_and_a_statement_that_holds(run: Path):
    statement = Statement.from_json((run / "statement.json").read_text())
    assert holds(verify(statement))
    card = (run / "README.md").read_text()
    assert "| data | digits |" in card
    assert statement.summary(100) in card
    assert "| parameters | 650 |" in card


def test_the_statement_for_a_person_and_a_machine(run: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    text = say(capsys, ["statement", str(run), "--full"]).out
    statement = Statement.from_json((run / "statement.json").read_text())
    assert text == statement.text(70) + "\n"
    assert max(map(len, text.splitlines()[:-4])) <= 70
    monkeypatch.setenv("COLUMNS", "80")
    short = say(capsys, ["statement", str(run)]).out
    assert short == statement.summary() + "\n"
    assert len(short.rstrip().splitlines()) == 10
    assert json.loads(say(capsys, ["statement", str(run / "statement.json"), "--json"]).out) == statement.to_dict()


def test_verify_says_what_does_not(run: Path, tmp_path, capsys):
    path = changed(run, tmp_path, epsilon={"rdp": 0.5})
    printed = say(capsys, ["verify", str(path)], 1).out
    assert "DOES NOT HOLD" in printed
    assert "is stated as 0.5 and follows as" in printed
    assert json.loads(say(capsys, ["verify", str(path), "--json"], 1).out)["holds"] is False
    assert "changed after it was written; dpcore verify says more" in say(capsys, ["statement", str(path)], 2).err


def test_a_comparison_names_the_folders_of_its_runs(run: Path, tmp_path, capsys):
    good = json.loads((run / "statement.json").read_text())
    for name, content in (("one", good), ("two", good | {"delta": 1e-4})):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "statement.json").write_text(json.dumps(content))

    def names(**folders: str) -> None:
        (tmp_path / "statement.json").write_text(json.dumps({"tuning": {}, "run_folders": folders}))

    names(one="runs/one", two="runs/two")
    assert main(["verify", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [all(item["status"] != "failed" for item in told["checks"][name]) for name in ("one", "two")] == [
        True,
        False,
    ]
    names(one="runs/one", again="runs/one")
    printed = say(capsys, ["statement", str(tmp_path)]).out
    assert printed.startswith("one\n\nPrivacy statement")
    assert printed.count("Privacy statement\n") == 2
    for folders, words in (
        ({"one": "../../elsewhere"}, "names a run outside of its folder"),
        ({"one": "runs/three"}, "there is no such file or folder"),
        ({"one": "."}, "has no privacy statement"),
        ({}, "names no run"),
    ):
        names(**folders)
        assert words in say(capsys, ["statement", str(tmp_path)], 2).err


NONSENSE = {
    "absent": "there is no such file or folder",
    "empty": "is a folder without a statement.json",
    "text.txt": "is not JSON; name the JSON file next to it",
    "list.json": "has no privacy statement",
    "deep.json": "is not JSON",
    "bytes.json": "is not JSON",
    "twice.json": "'delta' is twice in one object",
    "people.ledger": "is not JSON: if it is a ledger, dpcore ledger show and dpcore ledger verify read it",
}


@pytest.mark.parametrize("command", ["statement", "verify"])
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_one_sentence(command: str, name: str, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("Privacy statement")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "twice.json").write_text('{"settings_hash": "", "inner": {"delta": 0.1, "delta": 1e-5}}')
    Ledger.create(tmp_path / "people.ledger")
    printed = say(capsys, [command, str(tmp_path / name)], 2)
    assert NONSENSE[name] in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
