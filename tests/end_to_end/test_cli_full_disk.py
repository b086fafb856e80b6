"""A full disk: what was saved is said and what was not, errors name the files that a user knows, no drafts stay."""

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpcore.cli import main
from dpcore.errors import DataError
from dpcore.ledger import Ledger
from tests.end_to_end.command_line import say

RUN = ("train", "--epsilon", "3", "--epochs", "2", "--out", "run")


class Disk:
    """Has no room for the file `refused`, from its write number `first` on."""

    def __init__(self) -> None:
        self.refused, self.first = "", 1

    def sync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if self.refused and path.name == f".{self.refused}.draft":
            self.first -= 1
            if self.first <= 0:
                raise OSError(28, "No space left on device")


@pytest.fixture
def disk(tmp_path, monkeypatch) -> Iterator[Disk]:
    if not Path("/proc/self/fd").exists():
        pytest.skip("nothing tells the path of an open file here")
    made = Disk()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", made.sync)
    return made


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


BEGUN = {"config.json", "metrics.jsonl"}
STATED = BEGUN | {"statement.json", "statement.txt"}
CASES = {
    ("statement.txt", 1): ("no step was taken, and nothing was spent", BEGUN),
    ("statement.json", 2): (
        "run/statement.txt states an upper bound of what was spent: it counts the whole epoch", STATED
    ),
    ("model.safetensors", 1): ("run/statement.txt states what was spent", STATED),
    ("README.md", 1): ("run/statement.txt states what was spent", {*STATED, "model.safetensors"}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "first"), CASES)
def test_a_run_says_what_it_spent_and_leaves_whole_files(name: str, first: int, disk: Disk, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    disk.refused, disk.first = name, first
    *_, remark, error = say(capsys, RUN, 2).err.splitlines()
    words, saved = CASES[name, first]
    assert remark == f"remark: {words}"
    assert error == f"dpcore: run/{name}: No space left on device"
    assert names("run") == sorted(saved)  # each of them, no other, and no draft
    if "statement.json" in saved:  # it covers all steps that were taken, of which there are 23 an epoch
        lines = Path("run/metrics.jsonl").read_text().splitlines()
        taken = json.loads(Path("run/statement.json").read_text())["steps_taken"]
        assert taken >= 23 * len(lines)


def test_no_run_is_begun_where_its_first_file_has_no_room(disk: Disk, capsys):
    pytest.importorskip("torch")
    disk.refused = "config.json"
    error = say(capsys, RUN, 2).err.splitlines()[-1]
    assert error == "dpcore: run/config.json: No space left on device"
    assert names("run") == []


@pytest.fixture
def _full_database(monkeypatch) -> None:
    """No database may take a further page: SQLite then says, as on a full disk, that it is full."""
    connect = sqlite3.connect

    def limited(*given: Any, **named: Any) -> sqlite3.Connection:
        made = connect(*given, **named)
        made.execute("PRAGMA max_page_count=1")  # it becomes as many as there are
        return made

    monkeypatch.setattr(sqlite3, "connect", limited)


def test_a_ledger_on_a_full_disk_says_so_in_one_plain_sentence(tmp_path, request):
    ledger = Ledger.create(tmp_path / "people.ledger", budget=(3, 1e-5))
    run = ledger.begin(
        name="x" * 3000,
        adjacency=None,
        steps=3,
        key_digest="",
        description="x" * 9000,
        event_after=lambda *_: nothing(),
    )
    request.getfixturevalue("_full_database")
    before = ledger.seal
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"people\.ledger: the disk is full, so that nothing could be written in it"
        ):
            ledger.begin(
                name="x" * 3000, adjacency=None, steps=3, key_digest="", description="x" * 9000,
                event_after=lambda *_: nothing(),
            )  # fmt: skip
    assert ledger.seal == before
    assert ledger.verify().valid
    assert len(ledger.runs()) == 1
    run.close(0)
    assert main(["ledger", "create", str(tmp_path / "other.ledger")]) == 2
    assert names(str(tmp_path)) == ["people.ledger"]


def nothing() -> Any:
    from dpcore.accounting import Composed

    return Composed(())


@pytest.mark.usefixtures("_full_database")
def test_a_new_ledger_that_has_no_room_is_named_by_its_own_name(tmp_path, capsys):
    error = say(capsys, ["ledger", "create", str(tmp_path / "people.ledger")], 2).err
    assert error.startswith(f"dpcore: ledger {tmp_path}/people.ledger: the disk is full")
    assert names(str(tmp_path)) == []
