"""Where a ledger may lie: on a disk of this machine that can be written, where locks and flushes mean something."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dpcore.errors import DataError

MOUNTS = Path("/proc/self/mountinfo")

# File systems that another machine serves. Their locks may be local to each client, and their flushes may return before
# anything is safe: two machines could cross a budget together, and a row could be released whose reservation is lost.
_NETWORKED = frozenset(
    {
        "9p", "acfs", "afs", "auristorfs", "beegfs", "ceph", "cifs", "coda", "davfs", "davfs2", "fhgfs", "gfs", "gfs2",
        "glusterfs", "gpfs", "lustre", "mfs", "ncp", "ncpfs", "nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "panfs",
        "pvfs2", "smb", "smb2", "smb3", "smbfs", "wekafs",
    }
)  # fmt: skip
_NETWORKED_FUSE = re.compile(
    r"fuse\.(sshfs|s3fs|s3ql|gcsfuse|rclone|glusterfs|ceph.*|davfs2?|juicefs|blobfuse2?|goofys|hdfs.*|fuse_dfs|moosefs|"
    r"mfs.*|seaweedfs|curlftpfs|smbnetfs|grpcfuse|osxfs|beegfs|orangefs|afp.*|gvfsd-fuse|mount-s3|mountpoint-s3)"
)


def check_place(path: Path, mounts: Path = MOUNTS) -> None:
    """Refuse a ledger on a networked file system.

    Parameters
    ----------
    path : Path
        Of the ledger, whether it exists or not.
    mounts : Path
        The table of mounts; where there is none, nothing is refused.

    Raises
    ------
    DataError
        Naming the file system and where it is mounted.
    """
    found = file_system(path, mounts)
    if found is None:
        return
    kind, where = found
    if kind in _NETWORKED or _NETWORKED_FUSE.fullmatch(kind):
        raise DataError(
            f"ledger {path}: lies on a networked file system ({kind} at {where}), whose locks and flushes cannot be "
            "relied on; put it on a disk of this machine"
        )


def file_system(path: Path, mounts: Path = MOUNTS) -> tuple[str, str] | None:
    """Return the type of the file system that holds the path and where it is mounted; None where it is not known."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    target = os.path.realpath(path)
    best: tuple[int, str, str] | None = None
    for line in lines:
        left, separator, right = line.partition(" - ")
        fields, kinds = left.split(" "), right.split(" ")
        if not separator or len(fields) < 5:
            continue
        where = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = target == where or target.startswith(where.rstrip("/") + "/")
        # The longest prefix wins, and of several mounts over one place the last.
        if inside and (best is None or len(where) >= best[0]):
            best = len(where), kinds[0], where
    return None if best is None else best[1:]


def check_writable(path: Path) -> None:
    """Refuse a file, or a folder for a new one, that this process must not write.

    Raises
    ------
    DataError
        Naming what cannot be written.
    """
    folder = path.parent
    if not folder.is_dir():
        raise DataError(f"ledger {path}: there is no folder {folder}")
    if path.exists() and not os.access(path, os.W_OK):
        raise DataError(f"ledger {path}: is read-only, so that nothing could be reserved in it; make it writable")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(
            f"ledger {path}: the folder {folder} is read-only, and SQLite needs a journal beside the file; "
            "make it writable"
        )
