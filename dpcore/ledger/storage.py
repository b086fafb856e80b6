"""The SQLite file of a ledger: one connection for each operation, and a sentence for each failure.

Durability is essential: once a row is granted, a power loss must not undo the reservation. So the journal is a
rollback journal, and ``synchronous=EXTRA``: FULL flushes the journal and the file, but in this mode not the folder, and
a journal that a power loss brings back would undo the last reservation. A write-ahead log would be as durable; but then
the newest reservations are in a second file, and a copy of the ledger alone loses them.

A connection lasts for one operation. It never crosses a fork of the process (SQLite's do not survive that), belongs to
no thread, and is always closed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from dpcore.errors import DataError
from dpcore.ledger.state import FORMAT, START, Entry, seal
from dpcore.spec.canonical import read_json
from dpcore.spec.version import __version__
from dpcore.spec.whole_file import sync_names

if TYPE_CHECKING:
    import sqlite3

# The file systems on which a ledger is safe: locks and flushes work there.


MOUNTS = Path("/proc/self/mountinfo")

KNOWN: Final = frozenset(
    {"apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs", "nilfs2", "overlay", "reiserfs"}
    | {"ufs", "xfs", "zfs"}
)
"""File systems on a disk of one machine, on which SQLite's locks exclude every process and a flush reaches the disk.

All others need the owner's consent. On a file system that another machine serves (also the host of a virtual machine),
locks may be local to each client and flushes may return early: two machines could cross a budget together, and a row
could be released whose reservation is lost. A file in memory (tmpfs) ends with the machine, and the next ledger has
the whole budget. An overlay is as good as its upper layer, which the kernel demands to be local; in a container it ends
with the container, as any file ends with the folder that someone removes: docs/ledger.md says to use a volume.
"""

# With them, flushes do nothing or do not reach the disk.
_WITHOUT_FLUSHES = ("volatile", "nobarrier", "barrier=0")
_UNKNOWN = "an unknown file system", "?"


def check_place(path: Path, accept: bool = False, accepted: Collection[str] = ()) -> str | None:
    """Refuse a ledger on a file system that is not known to be safe, unless its owner accepts it or has `accepted` it.

    Return the file system that the owner accepts just now, to be recorded; None if there is nothing to record.
    """
    for place in (path.parent, path):  # the folder has SQLite's journal; the file may be mounted by itself
        kind, mount = file_system(place) if place.exists() else ("", "")
        if not kind or kind in KNOWN or kind in accepted:
            continue
        if accept:
            return kind
        raise DataError(
            f"ledger {path}: is on {kind} (mounted at {mount}), which is not known to keep locks, flushes and files "
            "as a disk of this machine does; put it on one (ext4, xfs, btrfs, zfs, apfs, ...), or accept the file "
            "system (accept_file_system=True, --accept-file-system), which every statement will say"
        )
    return None


def file_system(path: Path) -> tuple[str, str]:
    """Return the type of the file system of an existing path, and its mount point.

    On Linux they follow from the number of the mount. Elsewhere (macOS, BSD) the command ``mount`` lists them. If
    neither works, the type is "an unknown file system".
    """
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return _listed(os.path.realpath(path))
    number = _mount_number(path)
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(" "), right.partition(" ")
        if fields[0] == number and len(fields) > 5 and kind:
            weak = set(_WITHOUT_FLUSHES) & set(re.split(r"[ ,]", f"{fields[5]},{options}"))
            return " with ".join([kind, *sorted(weak)]), fields[4]
    return _UNKNOWN


def _mount_number(path: Path) -> str:
    # Closing O_PATH, unlike any other descriptor of the file, does not give up the locks that SQLite has on it.
    try:
        descriptor = os.open(path, os.O_PATH)
        try:
            match = re.search(r"^mnt_id:\s*(\d+)$", Path(f"/proc/self/fdinfo/{descriptor}").read_text(), re.MULTILINE)
        finally:
            os.close(descriptor)
    except OSError:
        return ""
    return match[1] if match else ""


def _listed(target: str) -> tuple[str, str]:
    """Take the type from the output of ``mount``: ``device on /folder (type, options)``."""
    import subprocess

    try:
        done = subprocess.run(["mount"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return _UNKNOWN
    mounts = re.findall(r"^.+? on (/.*) \(([^,)\s]+)", done.stdout, re.MULTILINE)
    holding = [(where, kind) for where, kind in mounts if f"{target}/".startswith(where.rstrip("/") + "/")]
    where, kind = max(holding, key=lambda mount: len(mount[0]), default=_UNKNOWN[::-1])
    return kind, where


def check_writable(path: Path) -> None:
    """Refuse a file, or a folder for a new one, that this process must not write."""
    folder = path.parent
    if not folder.is_dir():
        raise DataError(f"ledger {path}: there is no folder {folder}")
    if path.exists() and not os.access(path, os.W_OK):
        raise DataError(f"ledger {path}: is read-only, so that nothing could be reserved in it; make it writable")
    check_owners(path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(
            f"ledger {path}: the folder {folder} is read-only, and SQLite needs a journal next to the file; "
            "make it writable"
        )


def check_owners(path: Path) -> None:
    """Refuse a file that others may write: rewriting it takes back reservations, and no seal shows that."""
    if os.name == "nt" or not path.exists():  # there the mode says nothing about others
        return
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DataError(
            f"ledger {path}: has mode {mode:04o}, so that others than its owner could take back reservations; "
            f"run chmod 600 {shlex.quote(str(path))}"
        )


# The readable part of a ledger, whole or damaged; nothing is ever written to it.


# Every entry is canonical JSON with sorted keys. Of a file that SQLite no longer reads, the raw bytes are searched; an
# entry that lay on several pages is lost to that.
_OPENING = re.compile(rb'\{"[a-z_]+":')


def salvage(path: Path) -> dict[str, Any]:
    """Return whatever entries of the file at `path` can still be read, chain broken or not.

    Returns
    -------
    dict
        "entries": a list of their contents by number, and "seals": for those that SQLite still gave, the stored seal
        by number, as text; "chain_intact_up_to": how many entries from the first on follow from each other, seals
        included.

    Raises
    ------
    DataError
        If the file cannot be read at all.
    """
    bodies, seals, whole = _by_sqlite(Path(path))
    intact, last = 0, START
    while intact in bodies and seals.get(intact) == seal(last, bodies[intact]):
        last = seals[intact]
        intact += 1
    if not (whole and 0 < intact == len(bodies)):  # else keep off: closing the file gives up this process's locks on it
        try:
            content = Path(path).read_bytes()
        except OSError as cause:
            raise DataError(f"ledger {path}: cannot be read ({cause.strerror})") from cause
        bodies = _by_bytes(content) | bodies
    return {
        "entries": [read_json(bodies[number]) for number in sorted(bodies)],
        "seals": {str(number): seals[number] for number in sorted(seals)},
        "chain_intact_up_to": intact,
    }


def _by_sqlite(path: Path) -> tuple[dict[int, str], dict[int, str], bool]:
    """Return bodies and seals by number, and whether SQLite read the table to its end."""
    import sqlite3

    entries: dict[int, str] = {}
    seals: dict[int, str] = {}
    whole = False
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=1.0, isolation_level=None)
    except sqlite3.Error:
        return entries, seals, whole
    with closing(connection):
        for order in ("", " DESC"):  # forwards until it breaks, then backwards until it breaks
            try:
                rows = connection.execute(f"SELECT number, body, seal FROM entries ORDER BY number{order}")
                for number, body, sealed in rows:
                    if number in entries:
                        break
                    with suppress(TypeError, ValueError, AttributeError):
                        if read_json(body).get("entry") == number:
                            entries[number], seals[number] = body, str(sealed)
                whole = whole or not order
            except (sqlite3.Error, UnicodeDecodeError):
                continue
    return entries, seals, whole


def _by_bytes(content: bytes) -> dict[int, str]:
    entries, decoder, text, end = {}, json.JSONDecoder(), content.decode("latin-1"), 0
    for match in _OPENING.finditer(content):
        if match.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("entry"), int) and "kind" in value and "time" in value:
            entries[value["entry"]] = text[match.start() : end]
    return entries


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
    """A ledger's file; `read_only` forbids even to repair the remains of a crashed writer.

    `named` is the path for errors, if it differs; `until` the seal of the last entry to be read, if it is not the last.
    """

    def __init__(
        self, path: Path, *, read_only: bool = False, named: Path | None = None, until: str | None = None
    ) -> None:
        self.path, self.read_only, self.named, self._until = path, read_only, named or path, until

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for one operation, and turn failures into a `DataError`."""
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
            os.link(draft, path)  # fails if another process was first, unlike a rename
        except FileExistsError as cause:
            raise exists(path) from cause
        except OSError as cause:
            if isinstance(cause, DataError):
                raise
            raise DataError(f"ledger {path}: cannot be written there ({cause.strerror})") from cause
        finally:
            draft.unlink(missing_ok=True)
        sync_names(path.parent)
        return cls(path)

    def check(self) -> None:
        """Refuse a file that is no ledger of a version that this dpcore reads, and name what it is instead."""
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
        """Yield the stored entries from number `first` on; DataError if none has the seal that ends them."""
        rows = connection.execute("SELECT number, body, seal FROM entries WHERE number >= ? ORDER BY number", (first,))
        for entry in map(Entry._make, rows):
            yield entry
            if entry.seal == self._until:
                return
        if self._until is not None:
            raise DataError(f"ledger {self.path}: no entry has the seal {self._until}")

    def salt(self) -> bytes:
        """Return the ledger's random salt."""
        with self.connection() as connection:
            (salt,) = connection.execute("SELECT salt FROM secret").fetchone()
        return bytes(salt)

    def damaged(self, problem: str) -> DataError:
        """Return the error for an unreliable ledger, with the number of runs that can still be read."""
        salvaged = salvage(self.path)
        runs = sum(item.get("kind") == "begin" for item in salvaged["entries"])
        readable = len(salvaged["entries"])
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
        salvaged = salvage(self.path)
        if "not a database" in text and not salvaged["entries"]:
            return DataError(f"ledger {self.path}: is no ledger of dpcore: not even a database")
        return self.damaged(text)


def exists(path: Path) -> DataError:
    """Return the error for a new ledger whose file exists."""
    return DataError(f"ledger {path}: exists already, and a ledger is never overwritten; open it instead")
