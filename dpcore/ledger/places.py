"""The file systems on which a ledger is safe: locks and flushes work there."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final

from dpcore.errors import DataError

MOUNTS = Path("/proc/self/mountinfo")

KNOWN: Final = frozenset(
    {"apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs", "nilfs2", "overlay", "reiserfs"}
    | {"ufs", "xfs", "zfs"}
)
"""File systems on a disk of one machine, on which SQLite's locks exclude every process and a flush reaches the disk.

Everything else needs the owner's word. On what another machine serves (also the host of a virtual machine), locks may
be local to each client and flushes may return early: two machines could cross a budget together, and a row could be
released whose reservation is lost. What lies in memory (tmpfs) ends with the machine, and the next ledger begins with
the whole budget. An overlay is as good as its upper layer, which the kernel demands to be local; in a container it ends
with the container, as any file ends with the folder that someone removes: docs/ledger.md says to use a volume.
"""

# With them, flushes do nothing or do not reach the disk.
_WITHOUT_FLUSHES = ("volatile", "nobarrier", "barrier=0")
_UNKNOWN = "an unknown file system", "?"


def check_place(path: Path, accept: bool = False, accepted: Collection[str] = ()) -> str | None:
    """Refuse a ledger on a file system that is not known to be safe, unless its owner accepts it or has `accepted` it.

    Return the file system that the owner accepts just now, to be written down; None where nothing needs to be.
    """
    for place in (path.parent, path):  # the folder has SQLite's journal; the file may be mounted by itself
        kind, where = file_system(place) if place.exists() else ("", "")
        if not kind or kind in KNOWN or kind in accepted:
            continue
        if accept:
            return kind
        raise DataError(
            f"ledger {path}: lies on {kind} (mounted at {where}), which is not known to keep locks, flushes and files "
            "as a disk of this machine does; put it on one (ext4, xfs, btrfs, zfs, apfs, ...), or accept the file "
            "system (accept_file_system=True, --accept-file-system), which every statement will say"
        )
    return None


def file_system(path: Path) -> tuple[str, str]:
    """Return the type of the file system that holds an existing path and where it is mounted.

    Linux tells by the number of the mount. Elsewhere (macOS, BSD) the command ``mount`` lists them. Where neither
    does, the type is "an unknown file system".
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
            found = re.search(r"^mnt_id:\s*(\d+)$", Path(f"/proc/self/fdinfo/{descriptor}").read_text(), re.MULTILINE)
        finally:
            os.close(descriptor)
    except OSError:
        return ""
    return found[1] if found else ""


def _listed(target: str) -> tuple[str, str]:
    """Take the type from what ``mount`` writes: ``device on /folder (type, options)``."""
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
            f"ledger {path}: the folder {folder} is read-only, and SQLite needs a journal beside the file; "
            "make it writable"
        )


def check_owners(path: Path) -> None:
    """Refuse a file that others may write: who rewrites it takes back what was reserved, and no seal shows that."""
    if os.name == "nt" or not path.exists():  # there the mode says nothing about others
        return
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DataError(
            f"ledger {path}: has mode {mode:04o}, so that others than its owner could take back what was reserved; "
            f"run chmod 600 {shlex.quote(str(path))}"
        )
