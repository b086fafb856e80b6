"""What memory the machine has left for gradients, and whether an exception says that it had none."""

from __future__ import annotations

import ctypes
import os
import re
from typing import NamedTuple

import torch

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.spec.free_memory import host_memory, words

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


def free_memory(device: torch.device) -> tuple[int | None, str]:
    """Return the free bytes of a device, None if they cannot be known, and the words for it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds and does not use is free for this process.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached), str(device)
    return host_memory()


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h
_OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let the C library keep what tensors give back, for the next step's tensors; return whether it does.

    By default glibc gives every large block back to the system at once, so that each step touches all its pages for the
    first time again: of a transformer's step on a CPU that was 13 % of the processor time and 255,000 page faults
    (`docs/performance.md`). A user who chose an allocator or its settings, by one of these variables, has chosen.
    """
    if any(os.environ.get(name) for name in _OWN):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 2**30) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def is_out_of_memory(cause: BaseException) -> bool:
    """Whether an exception says that there was no memory: torch says it on a CPU by a RuntimeError."""
    if isinstance(cause, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(cause, RuntimeError) and "DefaultCPUAllocator: " in str(cause)
