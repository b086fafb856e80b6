"""Files that are written as a whole: under another name, then moved to their place in one step."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(target: Path, *, secret: bool = False) -> Iterator[IO[bytes]]:
    """Give a file to write to, which takes the place of `target` when the block ends well.

    A crash or a power loss leaves the old content or the new, never a part, and the new one after the block; an error
    or a signal leaves no draft either. With `secret` only its owner can read it, whatever the umask.

    Raises
    ------
    OSError
        If it cannot be written, as on a full disk; it names `target`, not the draft.
    """
    draft = target.with_name(f".{target.name}.draft")
    try:
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
        sync_names(target.parent)
    except OSError as cause:
        if cause.errno is None:
            raise
        raise OSError(cause.errno, os.strerror(cause.errno), str(target)) from cause
    finally:
        draft.unlink(missing_ok=True)


def sync_names(folder: Path) -> None:
    """Return when the folder's list of files is on disk: the content alone does not survive a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
