"""The machine's free memory, and the refusal of arrays that would not fit, before any is allocated."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from dpcore.errors import ArgumentError


def check_room(needed: int, said: str, instead: str, free: int | None, where: str) -> None:
    """Refuse to take more bytes than are free; if that is unknown, refuse nothing.

    A machine may promise memory that it does not have, and end the process when it is used: so check first.

    Parameters
    ----------
    needed : int
        Bytes.
    said : str
        The argument with its value and its arrays: ``"window=9: keeps 8 vectors"``.
    instead : str
        The advice.
    free, where : int or None, str
        The result of `host_memory`.

    Raises
    ------
    ArgumentError
        With one sentence.
    """
    if free is not None and needed > free:
        raise ArgumentError(f"{said}, which takes {words(needed)}, but {where} has {words(free)} free; {instead}")


def host_memory() -> tuple[int | None, str]:
    """Return the free bytes of this machine, None if they cannot be known, and the words for it."""
    bounds = [(size, where) for size, where in _bounds() if size is not None]
    return min(bounds) if bounds else (None, "this machine")


def words(size: float) -> str:
    """Return a size as it is read: 3 digits and a unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB" if size < 1000 else f"{size:.0f} GiB"


def _bounds() -> Iterator[tuple[int | None, str]]:
    """Yield the free bytes under each limit of this process."""
    page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    available = re.search(r"^MemAvailable:\s*(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    if available:
        yield int(available[1]) * 1024, "this machine"
    elif page and "SC_AVPHYS_PAGES" in os.sysconf_names:
        yield os.sysconf("SC_AVPHYS_PAGES") * page, "this machine"
    yield from ((size, "this control group") for size in _control_groups(Path("/")))
    try:
        import resource
    except ImportError:  # Windows
        return
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _text(Path("/proc/self/statm")).split()
    if most != resource.RLIM_INFINITY:
        yield max(most - (int(taken[0]) * page if taken else 0), 0), "this process's RLIMIT_AS"


def _control_groups(root: Path) -> Iterator[int | None]:
    """Yield the free bytes under each of Linux's control groups around this process, in both versions."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "" or "memory" in kinds.split(","):
            base = root / "sys/fs/cgroup" / ("memory" if kinds else "")
            limit, used = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
            )
            inside = base / path.lstrip("/")
            for folder in (inside, *inside.parents):
                if folder.is_relative_to(base):
                    yield _left(folder, limit, used)


def _left(folder: Path, limit: str, used: str) -> int | None:
    """Return the free bytes of a control group; files' pages that can be dropped do not count as used."""
    most, now = _text(folder / limit).strip(), _text(folder / used).strip()
    if not most.isdigit() or not now.isdigit():  # "max", or no such file
        return None
    file = re.search(r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
    return max(int(most) - int(now) + (int(file[1]) if file else 0), 0)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
