"""The process that holds a branch, and whether it is alive."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

_PROC = Path("/proc")


def this_process() -> dict[str, Any]:
    """Return what tells this process from every other, of this machine's present boot and of later ones."""
    pid = os.getpid()
    return {"boot": _boot(), "namespace": _namespace(pid), "pid": pid, "started": _started(pid)}


def lives(owner: Mapping[str, Any]) -> bool:
    """Whether the process may still be running: True unless it is certain that it is not.

    Its number alone says nothing, for numbers are given out again: the time at which it started must be the same. A
    process of another container counts as alive, since it cannot be seen from here.
    """
    if owner.get("boot") != _boot():
        return False
    if owner.get("namespace") != _namespace(os.getpid()):
        return True
    pid = int(owner["pid"])
    if owner.get("started") is None:
        return _answers(pid)
    return bool(_started(pid) == owner["started"])


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
        # The second field is the program's name in parentheses, which may hold spaces and parentheses itself.
        fields = (_PROC / f"{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
