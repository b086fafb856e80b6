"""The micro-batch: how many examples to differentiate at once under a memory limit.

What a proved graph takes follows from its sizes (`dpcore.torch.gradients.footprint`). Elsewhere a step's sum of one
and of two made-up examples is taken as training does, and the bytes of the tensors, and of the backend's arrays, that
live at one time are counted.

Notes
-----
The largest that fits is taken, up to the examples that a step may have: small products cost more than the page faults
of large arrays, and one micro-batch a step is one set of dropout masks, whatever the machine.
"""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
