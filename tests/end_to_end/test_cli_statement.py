"""`dpcore statement` and `dpcore verify` on what a real run wrote, and on nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from dpcore.cli import main
from dpcore.ledger import Ledger
from dpcore.statement import Statement
from dpcore.statement.verify import holds, verify
from tests.end_to_end.command_line import say


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("statement") / "run"
    line = "train --data digits --model logistic --epsilon 3 --delta 1e-5 --epochs 1 --json --out"
    assert main([*line.split(), str(folder)]) == 0
    return folder


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
    assert statement.settings_hash in card
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


def test_verify_says_what_holds(run: Path, capsys):
    printed = say(capsys, ["verify", str(run)]).out
    assert "The statement follows from its settings" in printed
    assert "failed" not in printed
    assert main(["verify", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["holds"] is True
    assert {"check": "adjacency", "status": "ok", "words": "add-remove"} in told["checks"]


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
        ({"one": "."}, "holds no privacy statement"),
        ({}, "names no run"),
    ):
        names(**folders)
        assert words in say(capsys, ["statement", str(tmp_path)], 2).err


NONSENSE = {
    "absent": "there is no such file or folder",
    "empty": "is a folder without a statement.json",
    "text.txt": "is not JSON; the JSON beside it is meant",
    "list.json": "holds no privacy statement",
    "deep.json": "is not JSON",
    "bytes.json": "is not JSON",
    "twice.json": "'delta' stands twice in one object",
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


def test_a_byte_order_mark_changes_nothing(run: Path, tmp_path):
    path = tmp_path / "saved by an editor.json"
    path.write_bytes(b"\xef\xbb\xbf" + (run / "statement.json").read_bytes())
    assert main(["verify", str(path)]) == 0
