"""What memory the machine has left for gradients, and whether an exception says that it had none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate

SHARE = 0.5
"""Of what is free when the run is built; the rest is for all that other programs and the model itself will take."""
UNKNOWN = 2**30
"""Where the machine does not tell what is free."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Limit(NamedTuple):
    """How many bytes a micro-batch may take, and where that comes from."""

    bytes: int
    source: str


def limit_of(max_memory: int | str | None, device: torch.device) -> Limit:
    """Return the limit that was given, or half of what is free on the device where the model is."""
    if max_memory is not None:
        return Limit(parse_memory(max_memory), f"max_memory={max_memory!r}")
    free, where = free_memory(device)
    if free is None:
        return Limit(UNKNOWN, "this machine does not tell what memory is free")
    return Limit(max(int(SHARE * free), 1), f"half of the {words(free)} that {where} had free at the build")


def parse_memory(max_memory: int | str) -> int:
    """Return a memory size in bytes, from a number of bytes or a text such as ``"1 GiB"`` or ``"512 MB"``."""
    if isinstance(max_memory, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", max_memory)
        if match is None or match[2].upper() not in _UNITS:
            raise ArgumentError(f"max_memory={max_memory!r}: must be bytes or a text such as '1 GiB' or '512 MB'")
        return validate.integer(minimum=1, max_memory=round(float(match[1]) * _UNITS[match[2].upper()]))
    if isinstance(max_memory, float):
        raise ArgumentTypeError(f"max_memory={max_memory!r}: must be whole bytes or a text such as '1 GiB'")
    return validate.integer(minimum=1, max_memory=max_memory)


def words(size: float) -> str:
    """Return a size as it is read: 3 digits and a unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB" if size < 1000 else f"{size:.0f} GiB"


def free_memory(device: torch.device) -> tuple[int | None, str]:
    """Return the free bytes of a device, None if they cannot be known, and the words for it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds and does not use is free for this process.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached), str(device)
    bounds = [(size, where) for size, where in _bounds() if size is not None]
    return min(bounds) if bounds else (None, "this machine")


def _bounds() -> Iterator[tuple[int | None, str]]:
    """Yield what each of those that may limit this process leaves to it."""
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
    """Yield what Linux's control groups around this process leave, of both versions of their files."""
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
    """Return what a control group leaves; files' pages that can be dropped do not count as used."""
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


def is_out_of_memory(cause: BaseException) -> bool:
    """Whether an exception says that there was no memory: torch says it on a CPU by a RuntimeError."""
    if isinstance(cause, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(cause, RuntimeError) and "DefaultCPUAllocator: " in str(cause)
