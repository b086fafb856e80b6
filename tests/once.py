"""What one worker of a run makes for all of them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Path]) -> Path:
    """Return the file that `make` writes into the folder it is given: of the workers of a run the first one calls it.

    The others wait for it. What it raises is raised in each of them, which try again.
    """
    import fcntl  # not on Windows, where nothing asks for it

    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    folder.mkdir(exist_ok=True)
    made = folder / "made"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_text(str(make(folder)))
    return Path(made.read_text())
