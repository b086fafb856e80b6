"""Processes that die at any moment, share a ledger, or fork: what was released is always covered."""

import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

from dpcore.errors import BudgetError, PrivacyError
from dpcore.ledger import Ledger, storage
from dpcore.ledger.allowance import largest
from dpcore.ledger.book import lives, this_process
from tests.depth import chosen
from tests.unit.ledger_tools import begin, full, new, poisson

KILLS = 20
STEPS = 10**4  # more than so many children reserve: each its rows, and a block of the largest size


def _in_a_child(work) -> int:  # type: ignore[no-untyped-def]
    """Fork, do the work there, and leave without any clean-up; return the child's number."""
    if child := os.fork():
        return child
    try:
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001 (a forked child of pytest must not run on)
        traceback.print_exc()
    finally:
        os._exit(1)


def _killed_after(released: int, seconds: float, path: Path, resume: tuple[str, str, int] | None) -> tuple[int, list]:
    """Let a child reserve rows and release them into a pipe; kill it some time after so many were released.

    Return the branch and its rows. Which moments these are depends on the machine; that a child gets so far does not.
    """
    reading, writing = os.pipe()

    def work() -> None:
        os.close(reading)
        ledger = Ledger.open(path)
        if resume is None:
            run, row = begin(ledger, steps=STEPS, name=f"{os.getpid()}", key_digest=""), 0
        else:
            run_id, branch_id, row = resume
            run, _ = ledger.resume(run_id, branch_id, row, event_after=poisson)
        os.write(writing, struct.pack("<q", int(run.branch_id.rpartition(".")[2])))
        for _ in range(released + 40):
            run.reserve(row)
            os.write(writing, struct.pack("<q", row))  # the release
            row += 1
        signal.pause()  # that no machine reaches the end of the plan

    child = _in_a_child(work)
    os.close(writing)
    told, wanted = b"", 8 * (1 + released) if released else 0
    while len(told) < wanted and (part := os.read(reading, wanted - len(told))):
        told += part
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL  # and it did not end by itself before
    while part := os.read(reading, 1 << 16):
        told += part
    os.close(reading)
    branch, *rows = [row for (row,) in struct.iter_unpack("<q", told)] or [-1]
    return branch, rows


def _kill_often(folder: Path, seed: int) -> None:
    """Kill KILLS children of one ledger, every fourth of them as it begins, the others amid their rows."""
    ledger, rng = new(folder, accept_file_system=True), np.random.default_rng(seed)
    resume = None
    start = time.perf_counter()
    practice = begin(Ledger.create(folder / "practice.ledger", accept_file_system=True))
    practice.reserve(0)
    needed = time.perf_counter() - start
    for number in range(KILLS):
        released = int(rng.integers(1, 25)) if number % 4 else 0
        number_of_branch, rows = _killed_after(released, float(rng.uniform(0.0, min(needed, 0.1))), ledger.path, resume)
        assert len(rows) >= released
        again = Ledger.open(ledger.path)
        if not again.runs():
            assert not rows
            continue
        held = again.runs()[-1]
        newest = f"{held.run_id}.{held.forks}"
        if rows:
            branch = f"{held.run_id}.{number_of_branch}"
            assert max(rows) < held.marks[branch]
            assert held.marks[branch] <= max(rows) + 1 + largest(STEPS), "over-counted by a block at most"
        assert held.event == poisson(held.releases)
        mark = held.marks[newest]
        forks = {item["child"]: item["row"] for item in again.export()["entries"] if item["kind"] == "fork"}
        first = max(int(rng.integers(max(0, mark - 40), mark + 1)), forks.get(newest, 0))
        resume = (held.run_id, newest, first)
        ledger = again
    assert ledger.verify().valid


@pytest.mark.parametrize("seed", range(chosen(2, 10)))
def test_killed_at_two_hundred_moments_covers_what_was_released(seed: int) -> None:
    # In memory where there is such a folder: a kill loses nothing that was written, and flushing is what takes long.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        _kill_often(Path(folder), seed)


def test_two_processes_never_cross_the_budget_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PATIENCE", 600.0)  # a slow disk is no failure
    ledger = new(tmp_path, budget=(6.0, 1e-5))
    most = ledger.remaining().steps(full, 10**6)
    begun, go = os.pipe(), os.pipe()

    def work() -> None:
        run, row = begin(Ledger.open(ledger.path), full, steps=STEPS, key_digest=""), 0
        os.write(begun[1], b".")
        os.close(go[1])
        os.read(go[0], 1)
        try:
            while True:
                run.reserve(row)
                row += 1
        except BudgetError:
            run.close(row)

    children = [_in_a_child(work) for _ in range(3)]
    for _ in children:
        os.read(begun[0], 1)
    os.close(go[1])  # all at once
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    for end in (*begun, go[0]):
        os.close(end)
    total = ledger.total()
    assert total.spent <= total.limit
    assert total.runs == 3
    # It is used to the last row, or nearly: what one gives back at its end, another may have missed.
    assert most - 3 * largest(STEPS) <= sum(run.releases for run in ledger.runs()) <= most
    assert ledger.verify().valid


def test_many_processes_make_one_ledger_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PATIENCE", 600.0)
    path = tmp_path / "people.ledger"
    children = [_in_a_child(lambda: Ledger.open_or_create(path, budget=(3, 1e-5))) for _ in range(6)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    assert os.listdir(tmp_path) == ["people.ledger"]


def test_a_fork_of_the_process_does_not_use_the_runs_noise(tmp_path: Path) -> None:
    ledger = new(tmp_path)
    run = begin(ledger)
    run.reserve(0)

    def work() -> None:
        with pytest.raises(PrivacyError, match=r"belongs to process \d+, and this is a fork of it"):
            run.reserve(0)
        run.close(0)  # does nothing here
        ledger.resume(run.run_id, run.branch_id, 0, event_after=poisson)[0].reserve(0)

    assert os.waitpid(_in_a_child(work), 0)[1] == 0
    run.reserve(1)
    (held,) = ledger.runs()
    assert held.forks == 1
    assert held.releases == sum(held.marks.values())


def test_whether_a_process_lives() -> None:
    me = this_process()
    assert lives(me)
    assert not lives({**me, "boot": "another"})
    assert not lives({**me, "started": me["started"] - 1})  # its number was given out again
    assert lives({**me, "namespace": "pid:[1]", "pid": 10**7})  # cannot be seen from here
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = {**me, "pid": child.pid, "started": None}
    assert lives(other)
    child.kill()
    state = ""
    while state != "Z":
        state, *others = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    started = int(others[18])
    assert not lives({**me, "pid": child.pid, "started": started})  # only its remains are there
    child.communicate()
    assert not lives(other)
