"""A ledger's file and the state of its entries, kept in step: read, and written one transaction at a time."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcore.accounting.branches import Branch
from dpcore.errors import DataError, PrivacyError
from dpcore.ledger import checks
from dpcore.ledger.state import START, Entry, Run, State, seal, write
from dpcore.ledger.storage import Storage

if TYPE_CHECKING:
    import sqlite3


class Book:
    """A ledger's file; its state, and the seal of the last entry, are of the last time it was read or written here."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.state, self.seal = State(), START
        self._process, self._lock, self._busy = os.getpid(), threading.RLock(), False
        with self.reading():
            pass

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.storage.path

    @property
    def ledger_id(self) -> str:
        """The ledger's."""
        return str(self.state.header["ledger"])

    def known(self, run_id: str, branch_id: str) -> tuple[Run, Branch]:
        """Return a run and one of its branches, or say why there is none."""
        run = self.state.runs.get(run_id)
        if run is None or branch_id not in run.branches:
            missing = f"run {run_id!r}" if run is None else f"branch {branch_id!r} of run {run_id}"
            other = not str(run_id).startswith(f"{self.ledger_id[:8]}-")
            why = "it is of another ledger" if other else "an older copy of the ledger was put back"
            raise DataError(
                f"ledger {self.path}: has no {missing}: {why}. Its releases are not known here, so it can neither be "
                "continued nor forked: begin a new run, which is charged from its first row"
            )
        return run, run.branches[branch_id]

    @contextmanager
    def reading(self) -> Iterator[Draft]:
        """Bring the state up to date, and let no other thread change it; nothing is to be written."""
        with self._alone(), self.storage.connection() as connection:
            self._catch_up(connection)
            yield Draft(self, connection)

    @contextmanager
    def writing(self) -> Iterator[Draft]:
        """Bring the state up to date in a transaction that no other process enters; durable on return."""
        if self.storage.read_only:
            raise DataError(f"ledger {self.path}: was opened to be read only")
        with self._alone():
            draft = None
            try:
                with self.storage.writing() as connection:
                    self._catch_up(connection)
                    draft = Draft(self, connection)
                    yield draft
            except BaseException:
                if draft is not None and draft.written:  # but not committed: it must not stay in memory either
                    self.state, self.seal = State(), START
                    with self.storage.connection() as connection:
                        self._catch_up(connection)
                raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if os.getpid() != self._process:  # a fork: the parent's threads are gone, and so must be their lock
            self._process, self._lock, self._busy = os.getpid(), threading.RLock(), False
        with self._lock:
            if self._busy:
                raise PrivacyError(
                    f"ledger {self.path}: a signal's handler used it in the middle of another use; use it after"
                )
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def _catch_up(self, connection: sqlite3.Connection) -> None:
        """Read the entries of other processes, and check that the entries read before are still there."""
        known = self.state.entries
        for entry in self.storage.entries(connection, max(0, known - 1)):
            if entry.number == known - 1:
                if entry.seal != self.seal:
                    raise self.storage.damaged(f"entry {entry.number} was exchanged while the ledger was open")
                known = -1
                continue
            try:
                problem = checks.follow(self.state, self.seal, entry)
                self.seal = entry.seal
            except BaseException:  # an interruption within an entry: the next reader reads all of them again
                self.state, self.seal = State(), START
                raise
            if problem:
                raise self.storage.damaged(problem)
        if known > 0 or not self.state.entries:
            raise self.storage.damaged("entries are missing that were there before" if known > 0 else "it has no entry")


class Draft:
    """The writes of one transaction."""

    def __init__(self, book: Book, connection: sqlite3.Connection) -> None:
        self._book, self._connection = book, connection
        self.written = False

    def append(self, kind: str, **content: Any) -> None:
        """Write an entry, and take it into account."""
        state = self._book.state
        self.written = True
        body = write({"entry": state.entries, "kind": kind, "time": now(), **content})
        entry = Entry(state.entries, body, seal(self._book.seal, body))
        self._connection.execute("INSERT INTO entries VALUES (?, ?, ?)", entry)
        state.apply(json.loads(body))
        self._book.seal = entry.seal

    def alive(self, run: Run) -> bool:
        """Whether a living process has a lease of one of the run's branches."""
        query = "SELECT owner FROM leases WHERE branch = ?"
        rows = [self._connection.execute(query, (branch_id,)).fetchone() for branch_id in run.branches]
        return any(lives(json.loads(row[0])) for row in rows if row is not None and row[0] != "null")

    def lease(self, branch_id: str) -> str:
        """Give a branch to this process, and return the token by which it is known again."""
        token = secrets.token_hex(8)
        row = (branch_id, token, json.dumps(this_process()))
        self._connection.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", row)
        return token

    def release(self, branch_id: str) -> None:
        """End the lease of a branch; its last owner may take it back until another process does."""
        self._connection.execute("UPDATE leases SET owner = 'null' WHERE branch = ?", (branch_id,))

    def leased(self, run_id: str, branch_id: str, token: str) -> tuple[Run, Branch]:
        """Return the run and the branch of a handle, which must still have the lease."""
        row = self._connection.execute("SELECT token, owner FROM leases WHERE branch = ?", (branch_id,)).fetchone()
        if row is None or row[0] != token:
            raise PrivacyError(f"run {run_id}: its branch {branch_id} was resumed by another process since; stop here")
        if row[1] == "null":  # given up, and nobody took it
            owner = json.dumps(this_process())
            self._connection.execute("UPDATE leases SET owner = ? WHERE branch = ?", (owner, branch_id))
        return self._book.known(run_id, branch_id)


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


_PROC = Path("/proc")


def this_process() -> dict[str, Any]:
    """Return an identity of this process, unique on this machine, in this boot and later ones."""
    pid = os.getpid()
    return {"boot": _boot(), "namespace": _namespace(pid), "pid": pid, "started": _started(pid)}


def lives(owner: Mapping[str, Any]) -> bool:
    """Whether the process may still be running: True unless it is certain that it is not.

    Its number is not enough, since numbers are used again: the time of its start must be the same. A process of
    another container counts as alive, since it cannot be seen from here.
    """
    if owner.get("boot") != _boot():
        return False
    if owner.get("namespace") != _namespace(os.getpid()):
        return True
    pid = int(owner["pid"])
    if owner.get("started") is not None:
        return bool(_started(pid) == owner["started"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is there, and somebody else's
        return True
    return True


@lru_cache(maxsize=1)
def _boot() -> str | None:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(_PROC / f"{pid}/ns/pid")
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """Return when the process started, in ticks since boot; None if there is none, or only its remains."""
    try:
        # The second field is the program's name in parentheses, which may contain spaces and parentheses itself.
        fields = (_PROC / f"{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
