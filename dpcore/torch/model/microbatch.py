"""The micro-batch: how many examples to differentiate at once under a memory limit.

Measured by differentiating one and two synthetic examples as training does, model and loss, and counting the bytes of
the tensors that live at one time.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate

DEFAULT_MAX_MEMORY = "1 GiB"

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


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


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the most bytes that tensors made by a call take at one time; what kernels use inside is not seen."""
    with _Peak() as count:
        function()
    return int(count.peak)


def microbatch_size(max_memory: int | str, one: int, two: int, rows: int) -> int:
    """Return the number of examples to differentiate at once, at least 1.

    `one` and `two` are the peak bytes of the gradient of one example and of two; `rows` are the bytes that the step
    holds for each example besides: the combination of points, and working space of the clip.
    """
    each = max(two - one, 1) + rows
    return max((parse_memory(max_memory) - max(2 * one - two, 0)) // each, 1)


class _Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages from the operation that makes them to their end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # What is given is the caller's or counted already, and a result may be a view of it.
        known = self._alive | {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in known:
                self._alive.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return result

    def _freed(self, number: int, size: int) -> None:
        self._alive.discard(number)
        self._now -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
