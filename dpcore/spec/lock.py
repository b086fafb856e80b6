"""Folders that one process at a time may use."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpcore.errors import DataError


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold the lock of a file while the block runs; a killed process leaves none behind.

    The file is made if there is none. DataError, with that sentence, if another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # no such lock on this system
        yield
        return
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            raise DataError(refusal) from cause
        yield
