"""Every file that is no whole ledger: one sentence each, and nothing is overwritten."""

import json
import os
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpcore import methods, minimize, sampling
from dpcore.errors import DataError, DpcoreError
from dpcore.ledger import Ledger, salvage, storage
from dpcore.ledger.state import State
from dpcore.methods import memf
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedOrderSampler
from dpcore.statement.verify import holds, verify
from tests.fresh import python
from tests.refused import refused
from tests.unit.ledger_tools import begin, new, poisson, released, restored

_MADE: list[bytes] = []


def filled(folder: Path) -> Ledger:
    """A ledger of two runs, each of which went on from its tenth row."""
    path = folder / "people.ledger"
    if _MADE:
        path.write_bytes(_MADE[0])
        return Ledger.open(path)
    ledger = new(folder, budget=(8, 1e-5))
    for name in ("first", "second"):
        run = begin(ledger, name=name, steps=100)
        released(run, 60)
        run.close(60)
        ledger.resume(run.run_id, run.branch_id, 10, event_after=poisson)[0].reserve(10)
    _MADE.append(path.read_bytes())
    return ledger


def refuse(path: Path, match: str) -> None:
    before = path.read_bytes() if path.is_file() else None
    for _ in range(2):
        refused(DataError, match, Ledger.open, path)
    if before is not None:
        assert path.read_bytes() == before
        refused(DataError, "exists already, and a ledger is never overwritten", Ledger.create, path)


def test_what_is_no_ledger(tmp_path: Path) -> None:
    refuse(tmp_path / "absent", "does not exist; dpcore ledger create makes one")
    (tmp_path / "folder").mkdir()
    refuse(tmp_path / "folder", "is a folder")
    for text, match in (("", "is an empty file"), ("epsilon = 3\n" * 1000, "not even a database")):
        (tmp_path / "text").write_text(text)
        refuse(tmp_path / "text", match)
    with closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("CREATE TABLE birds (name TEXT)")
    refuse(tmp_path / "other", "database of another program")
    with closing(sqlite3.connect(filled(tmp_path).path)) as newer:
        newer.execute("PRAGMA user_version = 7")
    refuse(tmp_path / "people.ledger", r"has format 7, and dpcore \S+ reads format 1.*update this one")
    with pytest.raises(DataError, match="there is no folder"):
        Ledger.create(tmp_path / "nowhere" / "a.ledger")
    with pytest.raises(DpcoreError, match="path=3"):
        Ledger.open(3)  # type: ignore[arg-type]


def test_a_torn_file(tmp_path: Path) -> None:
    ledger = filled(tmp_path)
    whole = ledger.path.read_bytes()
    for share in (0.02, 0.3, 0.6, 0.95):
        torn = tmp_path / f"torn {share}"
        torn.write_bytes(whole[: int(share * len(whole))])
        refuse(torn, r"is damaged|not even a database")
        rest = salvage(torn)
        assert rest["chain_intact_up_to"] <= len(rest["entries"])
        known = {json.dumps(item, sort_keys=True) for item in ledger.export()["entries"]}
        assert {json.dumps(item, sort_keys=True) for item in rest["entries"]} <= known
    assert len(rest["entries"]) > 5
    refused(DataError, r"\d+ entries \(runs: [12]\) can still be read: dpcore ledger export", Ledger.open, torn)


def test_flipped_bits_never_give_another_answer(tmp_path: Path) -> None:
    ledger = filled(tmp_path)
    whole, told = ledger.path.read_bytes(), ledger.export()
    rng = np.random.default_rng(3)
    flipped, noticed = tmp_path / "flipped", 0
    for _ in range(60):
        content = bytearray(whole)
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        flipped.write_bytes(bytes(content))
        try:
            again = Ledger.open(flipped)
            assert again.export()["entries"] == told["entries"]  # the bit was in unused space, or in an index
            noticed += not again.verify().valid
        except DataError:
            noticed += 1
        assert flipped.read_bytes() == bytes(content)
    assert noticed > 10


def _tampered(ledger: Ledger, statement: str) -> Path:
    with closing(sqlite3.connect(ledger.path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER entries_stay")
        connection.execute("DROP TRIGGER entries_remain")
        assert connection.execute(statement).rowcount
    return ledger.path


def test_entries_cannot_be_changed_or_removed_by_accident(tmp_path: Path) -> None:
    with closing(sqlite3.connect(filled(tmp_path).path)) as connection:
        refused(sqlite3.IntegrityError, "never changed", connection.execute, "UPDATE entries SET body = '{}'")
        refused(sqlite3.IntegrityError, "never removed", connection.execute, "DELETE FROM entries")


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        ("UPDATE entries SET body = replace(body, ':100', ':999') WHERE number = 1", "entry 1 was changed"),
        ("DELETE FROM entries WHERE number = 4", "entry 5 was changed"),
        ("UPDATE entries SET seal = upper(seal) WHERE number = 3", "entry 3 was changed"),
        ("DELETE FROM entries", "it has no entry"),
    ],
)
def test_tampering_is_noticed(tmp_path: Path, statement: str, match: str) -> None:
    ledger = filled(tmp_path)
    refuse(_tampered(ledger, statement), match)
    assert statement == "DELETE FROM entries" or not ledger.verify().valid


def test_a_cut_end_needs_a_seal_from_elsewhere(tmp_path: Path) -> None:
    ledger = filled(tmp_path)
    seal = ledger.seal
    assert ledger.verify(seal=seal).valid
    path = _tampered(ledger, "DELETE FROM entries WHERE number > 5")
    for use in (ledger.total, lambda: begin(ledger)):  # it was open when that happened
        refused(DataError, "entries are missing that were there before", use)
    assert Ledger.open(path).verify().valid  # as the page says
    (problem,) = Ledger.open(path).verify(seal=seal).problems
    assert "the end was cut off" in problem


def test_counters_must_follow_from_each_other(tmp_path: Path) -> None:
    exported = filled(tmp_path).export()
    for change in ({"releases": 3}, {"mark": -1}, {"charge": "nan"}, {"charge": -1.0}, {"branch": "x"}, {"kind": "y"}):
        state = State()
        for content in exported["entries"]:
            if content["kind"] == "reserve" and content["mark"] > 5:
                break
            state.apply(content)
        refused(ValueError, r"^(takes|counts|has the|is about|is of the)", state.apply, {**content, **change})


def test_everything_comes_back_from_json(tmp_path: Path) -> None:
    ledger = filled(tmp_path)
    exported = json.loads(json.dumps(ledger.export(), allow_nan=False))
    again = restored(tmp_path / "again", exported)
    assert again.runs() == ledger.runs()
    assert again.total() == replace(ledger.total(), kept=0.0)  # no process holds a run of the new one
    assert again.export() == ledger.export()
    assert (again.seal, again.ledger_id, again.budget) == (ledger.seal, ledger.ledger_id, ledger.budget)
    assert (tmp_path / "again").stat().st_mode & 0o777 == 0o600
    exported["entries"][3]["time"] = "then"
    with pytest.raises(DataError, match=r"entry 3 was changed"):
        restored(tmp_path / "more", exported)
    assert salvage(ledger.path)["entries"] == ledger.export()["entries"]


def test_a_ledger_that_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = filled(tmp_path)
    run = begin(ledger)
    monkeypatch.setattr(storage, "PATIENCE", 0.2)
    other = sqlite3.connect(ledger.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    for use in (lambda: run.reserve(0), ledger.runs, lambda: Ledger.open(ledger.path)):
        refused(DataError, r"kept it locked for 0\.2 s; try again", use)
    other.execute("COMMIT")
    run.reserve(0)
    other.close()


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = filled(tmp_path)
    refused(DataError, r"is on (proc|an unknown file system)", Ledger.create, "/proc/people.ledger")
    allowed = os.access
    # Root may write everywhere, whatever the mode says.
    monkeypatch.setattr(os, "access", lambda path, mode: not os.path.isdir(path) and allowed(path, mode))
    for use in (lambda: Ledger.open(ledger.path), lambda: Ledger.create(tmp_path / "b.ledger")):
        refused(DataError, r"the folder .* is read-only", use)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(DataError, "is read-only, so that nothing could be reserved", Ledger.open, ledger.path)
    looked_at = Ledger.open(ledger.path, read_only=True)
    assert looked_at.total() == ledger.total()
    refused(DataError, "was opened to be read only", begin, looked_at)


@pytest.mark.skipif(os.name == "nt", reason="modes say nothing about others there")
def test_a_ledger_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = filled(tmp_path).path
    for mode in (0o666, 0o660, 0o602):
        path.chmod(mode)
        refused(DataError, rf"has mode {mode:04o}.* run chmod 600 {path}$", Ledger.open, path)
        assert Ledger.open(path, read_only=True).runs()  # nothing is reserved
    for mode in (0o600, 0o644):
        path.chmod(mode)
        Ledger.open(path)
    before = os.umask(0)
    try:
        made = Ledger.create(tmp_path / "made")
    finally:
        os.umask(before)
    assert made.path.stat().st_mode & 0o777 == 0o600


def mounted(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let the table of mounts say that the folder's mount is one of this kind, among others."""
    number = storage._mount_number(folder)
    table = f"1{number} 1 0:1 / / rw - nfs x rw\n{number} 1 8:1 / /there rw,relatime shared:5 - {kind}\ngarbage\n"
    (folder / "mountinfo").write_text(table)
    monkeypatch.setattr(storage, "MOUNTS", folder / "mountinfo")


def test_disks_of_this_machine_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("ext4", "xfs", "btrfs", "zfs", "overlay", "f2fs", "apfs", "bcachefs"):
        mounted(tmp_path, monkeypatch, f"{kind} /dev/sda1 rw,discard")
        assert storage.check_place(tmp_path / "a", accept=True) is None


@pytest.mark.parametrize(
    ("mount", "kind"),
    [
        *((f"{kind} x rw", kind) for kind in ("nfs4", "9p", "virtiofs", "tmpfs", "fuse.new")),
        ("overlay overlay rw,lowerdir=/l,upperdir=/u,volatile", "overlay with volatile"),
        ("ext4 /dev/sda1 rw,nobarrier", "ext4 with nobarrier"),
    ],
)
def test_what_else_there_is_needs_the_owners_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, kind: str
) -> None:
    moved = filled(tmp_path)
    monkeypatch.setattr(storage, "KNOWN", storage.KNOWN - {kind})  # pytest's folders may lie on it
    mounted(tmp_path, monkeypatch, mount)
    for use in (
        lambda **word: Ledger.open(moved.path, **word),
        lambda **word: Ledger.create(tmp_path / "new", **word),
        lambda **word: Ledger.open_or_create(tmp_path / "newer", **word),
    ):
        refused(DataError, rf"is on {kind} \(mounted at /there\).*accept_file_system=True", use)
        ledger = use(accept_file_system=True)
        entries = len(ledger.export()["entries"])
        assert ledger.file_systems == Ledger.open(ledger.path).file_systems == (kind,)
        assert len(Ledger.open(ledger.path, accept_file_system=True).export()["entries"]) == entries
        assert ledger.verify().valid


def test_the_file_system_is_that_of_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not storage.MOUNTS.exists():
        pytest.skip("needs Linux's table of mounts")
    assert storage.file_system(Path("/proc")) == ("proc", "/proc")
    number = storage._mount_number(tmp_path)
    lines = [line.split(" ") for line in storage.MOUNTS.read_text().splitlines()]
    (device,) = {line[2] for line in lines if line[0] == number}
    assert device == f"{os.major(os.stat(tmp_path).st_dev)}:{os.minor(os.stat(tmp_path).st_dev)}"
    monkeypatch.setattr(storage, "_mount_number", lambda path: "")
    with pytest.raises(DataError, match="is on an unknown file system"):
        Ledger.create(tmp_path / "a")


def test_file_systems_without_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What macOS's ``mount`` writes; where there is no such command, the owner's word is needed."""
    monkeypatch.setattr(storage, "MOUNTS", tmp_path / "absent")
    table = (
        "/dev/disk3s1s1 on / (apfs, sealed, local)\n//me@host/x on /Volumes/a b (smbfs, nodev)\nx on /Volumes/a (hfs)\n"
    )
    command = tmp_path / "mount"
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{table}END\n")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    kinds = {"/Users": "apfs", "/Volumes/a b/c": "smbfs", "/Volumes/a": "hfs", "/Volumes/ab": "apfs"}
    assert {path: storage.file_system(Path(path))[0] for path in kinds} == kinds
    monkeypatch.setenv("PATH", str(tmp_path / "absent"))
    with pytest.raises(DataError, match="an unknown file system"):
        Ledger.create(tmp_path / "a")


def test_a_statement_repeats_the_owners_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "KNOWN", storage.KNOWN - {"tmpfs"})
    mounted(tmp_path, monkeypatch, "tmpfs tmpfs rw")
    ledger, sampler = new(tmp_path, accept_file_system=True), sampling.PoissonSampler(dataset_size=20, batch_size=5)
    method = methods.dp_sgd(lr=0.1, noise_multiplier=1.0)
    result = minimize(lambda x, i: np.ones((len(i), 1)), np.zeros(1), sampler, method, steps=2, ledger=ledger)
    statement = result.statement(1e-5)
    assert holds(verify(statement))
    silent = replace(statement, caveats=tuple(one for one in statement.caveats if "tmpfs" not in one))
    assert any("lacks: The ledger lies" in finding.words for finding in verify(silent))


def test_salvaging_a_whole_ledger_keeps_the_locks_of_this_process(tmp_path: Path) -> None:
    """Closing any descriptor of the file gives up all locks that the process has on it."""
    ledger = filled(tmp_path)
    with storage.Storage(ledger.path).writing():
        assert salvage(ledger.path)["entries"]
        other = f"import sqlite3; sqlite3.connect({str(ledger.path)!r}, timeout=0).execute('BEGIN IMMEDIATE')"
        done = python("-c", other)
    assert "database is locked" in done.stderr


def test_a_power_loss_takes_no_reservation_back(tmp_path: Path) -> None:
    """What SQLite needs for that: a rollback journal whose folder is flushed too, and the entry in one file."""
    ledger = filled(tmp_path)
    with storage.Storage(ledger.path).connection() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
        assert connection.execute("PRAGMA fullfsync").fetchone() == (1,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert os.listdir(tmp_path) == ["people.ledger"]


def test_a_ledger_of_before_is_read_and_its_runs_go_on() -> None:
    """It knows of replays and of settings by row, and charged abandoned rows of correlated noise as whole runs."""
    exported = json.loads((Path(__file__).parents[2] / "golden" / "ledger-of-0.1.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        ledger = restored(Path(folder) / "ledger", exported)
        assert ledger.verify().valid
        assert [(run.releases, run.forks) for run in ledger.runs()] == [(24, 1), (24, 1)]
        spent = ledger.total().spent
        assert spent == pytest.approx(0.59750504, rel=1e-6)
        plan = Plan(
            memf(lr=1.0, noise_multiplier=6.0, strategy="tree"), FixedOrderSampler(dataset_size=100, batch_size=25), 24
        )
        run = ledger.runs()[1]
        branch, _ = ledger.resume(run.run_id, f"{run.run_id}.1", 12, event_after=plan.event_after)
        branch.reserve(12)
        assert run.marks == {f"{run.run_id}.0": 21, f"{run.run_id}.1": 13}
        assert ledger.runs()[1].event == plan.event_after(branch.mark, ((10, 21), (12, 13)))
        assert ledger.total().spent < spent
