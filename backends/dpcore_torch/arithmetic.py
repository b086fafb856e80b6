"""The arithmetic that the bounds assume: float32 products in float32, and denormal numbers read as they are."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dpcore.errors import BackendError
from dpcore_numpy.denormals import denormals_are_zero

# From this many numbers a thread on, torch widens them in several threads.
_GRAIN = 1 << 15


class _Products:
    """oneDNN is off while any thread of the process is in such a block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._enabled = 0, True

    def enter(self) -> None:
        with self._lock:
            if not self._inside:
                self._enabled = torch._C._get_mkldnn_enabled()
                torch._C._set_mkldnn_enabled(False)
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch._C._set_mkldnn_enabled(self._enabled)


class _Known(threading.local):
    """The process and number of workers for which this thread's workers were checked."""

    asked: tuple[int, int] | None = None


_products, _known = _Products(), _Known()


@contextmanager
def bounded() -> Iterator[None]:
    """Run the decorated function in this arithmetic, and restore the caller's.

    Raises
    ------
    BackendError
        If a worker thread of torch reads denormal numbers as zero.

    Notes
    -----
    oneDNN uses bfloat16 for float32 products if `torch.set_float32_matmul_precision` or its environment allows it, and
    so does autocast. Each thread has its own setting for denormals: this thread's is set, and workers copy it when they
    begin; workers that began before are checked once.
    """
    flushes = denormals_are_zero()
    if flushes:
        torch.set_flush_denormal(False)
    _products.enter()
    try:
        _check_workers()
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        _products.leave()
        if flushes:
            torch.set_flush_denormal(True)


def _check_workers() -> None:
    asked = os.getpid(), torch.get_num_threads()
    if _known.asked == asked:
        return
    bits = torch.full((asked[1] * _GRAIN,), 1 << 9, dtype=torch.int32, device="cpu")
    if bool((bits.view(torch.float32).to(torch.float64) == 0).any()):
        raise BackendError(
            "threads of torch read denormal numbers as zero: must read them as they are; "
            "do not call torch.set_flush_denormal(True) before they begin, or call it with False first"
        )
    _known.asked = asked
