"""What memory the machine has left for gradients, how many examples fit it at once, and whether there was none.

What a proved graph takes follows from its sizes (`dpcore.torch.gradients.footprint`). Elsewhere a step's sum of one
and of two made-up examples is taken as training does, and the bytes of the tensors, and of the backend's arrays, that
live at one time are counted.

Notes
-----
The largest that fits is taken, up to the examples that a step may have: small products cost more than the page faults
of large arrays, and one micro-batch a step is one set of dropout masks, whatever the machine.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import tracemalloc
import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the most bytes that tensors and arrays made by a call take at one time.

    NumPy's arrays are seen by `tracemalloc`, and a few kilobytes of Python's objects with them. What a kernel uses
    inside is not seen.
    """
    gc.collect(1)  # so that the collector runs at the same places of the call every time
    mine = not tracemalloc.is_tracing()
    if mine:
        tracemalloc.start()
    try:
        with Peak() as count:
            function()
            count.look()
    finally:
        if mine:
            tracemalloc.stop()
    return int(count.peak)


def microbatch_size(limit: int, needed: Callable[[int], int], most: int) -> int:
    """Return the number of examples to differentiate at once, at least 1.

    `needed` gives the bytes that a step's sum of so many examples takes, more for more of them; `most` are the examples
    that a step may have, which are cut into micro-batches of nearly one size.
    """
    fits = max(bisect_right(range(1, most + 1), limit, key=needed), 1)
    return -(-most // -(-most // fits))


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages from the operation that makes them to their end, and those of arrays."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._alive: set[int] = set()
        self._before = tracemalloc.get_traced_memory()[0]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look()
        result = function(*args, **(kwargs or {}))
        # What is given is the caller's or counted already, and a result may be a view of it.
        known = self._alive | {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in known:
                self._alive.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.look()
        return result

    def look(self) -> None:
        """Count the most that the arrays took since the last look, while the tensors stayed the same."""
        self.peak = max(self.peak, self._now + tracemalloc.get_traced_memory()[1] - self._before)
        tracemalloc.reset_peak()

    def _freed(self, number: int, size: int) -> None:
        self.look()
        self._alive.discard(number)
        self._now -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
