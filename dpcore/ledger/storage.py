"""The SQLite file of a ledger: one connection for each operation, and a sentence for everything that goes wrong.

Durability is what counts: once a row is granted, a power loss must not take the reservation back. So the journal is a
rollback journal, and ``synchronous=EXTRA``: FULL flushes the journal and the file, but in this mode not the folder, and
a journal that a power loss brings back would undo the last reservation. A write-ahead log would be as durable; but then
the newest reservations lie in a second file, and whoever copies the ledger alone loses them.

A connection lasts for one operation. It never crosses a fork of the process (SQLite's do not survive that), belongs to
no thread, and leaves nothing open.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from dpcore.errors import DataError
from dpcore.ledger.entries import Entry
from dpcore.ledger.salvage import salvage
from dpcore.ledger.state import FORMAT
from dpcore.spec.version import __version__

if TYPE_CHECKING:
    import sqlite3

APPLICATION = 0x64704C67  # "dpLg"

# Seconds to wait for another process that is writing.
PATIENCE = 10.0

_SCHEMA = f"""
CREATE TABLE entries (number INTEGER PRIMARY KEY, body TEXT NOT NULL, seal TEXT NOT NULL);
CREATE TABLE leases (branch TEXT PRIMARY KEY, token TEXT NOT NULL, owner TEXT NOT NULL);
CREATE TABLE secret (salt BLOB NOT NULL);
CREATE TRIGGER entries_stay BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END;
CREATE TRIGGER entries_remain BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never removed'); END;
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {FORMAT};
"""


class Storage:
    """A ledger's file; `read_only` forbids even to put right what a crashed writer left.

    `named` is the path that errors name, where that is another one.
    """

    def __init__(self, path: Path, *, read_only: bool = False, named: Path | None = None) -> None:
        self.path, self.read_only, self.named = path, read_only, named or path

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Give a connection for one operation, and turn what goes wrong into a `DataError`."""
        import sqlite3

        mode = "ro" if self.read_only else "rw"
        try:
            connection = sqlite3.connect(
                f"file:{quote(str(self.path))}?mode={mode}", uri=True, timeout=PATIENCE, isolation_level=None
            )
            try:
                connection.execute("PRAGMA synchronous=EXTRA")
                connection.execute("PRAGMA fullfsync=ON")  # macOS: a plain fsync leaves it in the disk's cache
                connection.execute("PRAGMA trusted_schema=OFF")
                yield connection
            finally:
                connection.close()
        except sqlite3.DatabaseError as cause:
            raise self._sentence(cause) from cause
        except UnicodeDecodeError as cause:
            raise self.damaged("some of its text is none") from cause

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Give a connection inside of one transaction that no other process can enter; durable once this returns."""
        with self.connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                if connection.in_transaction:  # SQLite may have taken it back already, as on a full disk
                    connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    @classmethod
    def create(cls, path: Path, entries: Sequence[Entry]) -> Storage:
        """Make the file with its first entries, whole or not at all; mode 0600."""
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
        try:
            os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            with cls(draft, named=path).connection() as connection:
                connection.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}")
                connection.executemany("INSERT INTO entries VALUES (?, ?, ?)", entries)
                connection.execute("INSERT INTO secret VALUES (?)", (secrets.token_bytes(32),))
                connection.execute("COMMIT")
            os.link(draft, path)  # fails where another process was first, unlike a rename
        except FileExistsError as cause:
            raise exists(path) from cause
        except OSError as cause:
            if isinstance(cause, DataError):
                raise
            raise DataError(f"ledger {path}: cannot be written there ({cause.strerror})") from cause
        finally:
            draft.unlink(missing_ok=True)
        _flush_folder(path.parent)
        return cls(path)

    def check(self) -> None:
        """Refuse whatever is no ledger of a version that this dpcore reads, and say what it is instead."""
        if not self.path.exists():
            raise DataError(f"ledger {self.path}: does not exist; dpcore ledger create makes one")
        if not self.path.is_file():
            raise DataError(f"ledger {self.path}: is a folder; name the file in it")
        if self.path.stat().st_size == 0:
            raise DataError(f"ledger {self.path}: is an empty file: no ledger, or one that lost everything")
        with self.connection() as connection:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            raise DataError(f"ledger {self.path}: is a database of another program, not a ledger of dpcore")
        if version != FORMAT:
            raise DataError(
                f"ledger {self.path}: has format {version}, and dpcore {__version__} reads format {FORMAT}; "
                "it was written by a newer dpcore: update this one"
            )

    def entries(self, connection: sqlite3.Connection, first: int) -> Iterator[Entry]:
        """Yield the stored entries from number `first` on."""
        rows = connection.execute("SELECT number, body, seal FROM entries WHERE number >= ? ORDER BY number", (first,))
        yield from map(Entry._make, rows)

    def salt(self) -> bytes:
        """Return the ledger's random salt."""
        with self.connection() as connection:
            (salt,) = connection.execute("SELECT salt FROM secret").fetchone()
        return bytes(salt)

    def damaged(self, problem: str) -> DataError:
        """Return the error for a ledger that cannot be relied on, with what can still be read."""
        found = salvage(self.path)
        runs = sum(item.get("kind") == "begin" for item in found["entries"])
        readable = len(found["entries"])
        return DataError(
            f"ledger {self.path}: is damaged: {problem}. {readable} entries (runs: {runs}) can still be read: "
            f"dpcore ledger export {self.path} writes them out. The file was left as it is; do not train against it"
        )

    def _sentence(self, cause: sqlite3.DatabaseError) -> DataError:
        import sqlite3

        text = str(cause)
        if isinstance(cause, sqlite3.OperationalError):
            if "locked" in text or "busy" in text:
                return DataError(
                    f"ledger {self.named}: another process has kept it locked for {PATIENCE:g} s; try again when that "
                    "one is done, or has been stopped"
                )
            if "readonly" in text:
                return DataError(f"ledger {self.named}: is read-only, so that nothing could be reserved in it ({text})")
            if "full" in text:
                return DataError(
                    f"ledger {self.named}: the disk is full, so that nothing could be written in it and nothing was "
                    "reserved; make room on the disk and try again"
                )
            if "malformed" not in text and "no such" not in text:
                return DataError(f"ledger {self.named}: cannot be used now ({text}); nothing was reserved")
        found = salvage(self.path)
        if "not a database" in text and not found["entries"]:
            return DataError(f"ledger {self.path}: is no ledger of dpcore: not even a database")
        return self.damaged(text)


def exists(path: Path) -> DataError:
    """Return the error for a new ledger where a file is."""
    return DataError(f"ledger {path}: exists already, and a ledger is never overwritten; open it instead")


def _flush_folder(folder: Path) -> None:
    """Make the folder's list of files durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
