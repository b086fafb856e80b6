"""Reading ahead: the batches of later steps, read in other processes while this one takes a step.

Not in a thread. Generators of torch, NumPy and Python belong to a whole process, and both reading and the step set them
from the run's key: a thread that read while the model drew dropout masks would change the masks, and draw other
numbers itself. A process has generators of its own, so that a batch is the same wherever it is read.

Nothing of a run changes here. A request is a function of the places and the seed of a later step. The step draws its
batch as it would without reading ahead, and takes the data that were read only if they are for the same places and
seed. After a fork of the run's keys they are for others, and are dropped.
"""

import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import torch
from torch import multiprocessing

from dpcore.torch.data import batches

_PATIENCE = 2.0
"""Seconds after which a worker looks whether the process that it reads for is still there."""

Request = tuple[bytes, tuple[int, ...]]
"""The seed and the places, which determine a batch. Secret."""

Answer = dict[str, torch.Tensor] | str
"""The tensors of a batch by their names, or the reason if it could not be read."""


class Ahead:
    """Up to `count` worker processes, each with a copy of the data set from when they began.

    They begin at the first request, in the way that `torch.multiprocessing` does on this system, as the workers of
    torch's own DataLoader do. If they cannot read, the caller does, after a warning. `reader` has the caller's `read`.
    """

    def __init__(self, reader: Any, count: int) -> None:
        self._reader, self._count = reader, count
        self._pool: ProcessPoolExecutor | None = None
        self._requested: dict[Request, Future[Answer]] = {}
        self._process, self._broken = os.getpid(), False

    def ask(self, places: Sequence[int], seed: bytes) -> None:
        """Request a batch, unless it is requested already."""
        request = seed, tuple(places)
        if os.getpid() != self._process:  # forked: the workers are the parent's
            self._process, self._pool, self._requested = os.getpid(), None, {}
        if self._broken or request in self._requested:
            return
        while len(self._requested) > self._count:  # the run went another way, and the oldest stays unused
            self._requested.pop(next(iter(self._requested))).cancel()
        try:
            with warnings.catch_warnings():
                # Python warns of every fork with threads, which do not exist in a worker.
                warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
                self._requested[request] = self._workers().submit(_read, seed, request[1])
        except Exception as cause:  # noqa: BLE001 - no process to be had, or a data set that cannot be sent there
            self._give_up(type(cause).__name__)

    def _workers(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context()
            self._pool = ProcessPoolExecutor(self._count, context, _begin, (self._reader,))
            self._end = weakref.finalize(self, _end, self._pool, os.getpid())
        return self._pool

    def take(self, places: Sequence[int], seed: bytes) -> dict[str, torch.Tensor] | None:
        """Return a requested batch, or None if it was not requested, or could not be read."""
        if os.getpid() != self._process or (future := self._requested.pop((seed, tuple(places)), None)) is None:
            return None
        try:
            answer = future.result()
        except Exception as cause:  # noqa: BLE001 - the worker ended
            answer = type(cause).__name__
        if isinstance(answer, str):
            self._give_up(answer)
            return None
        return answer

    def _give_up(self, reason: str) -> None:
        """End all workers for good."""
        self._requested, self._broken = {}, True
        if self._pool is not None:
            self._end()
        warnings.warn(
            f"num_workers: reading ahead ended ({reason}); from here on batches are read when they are needed",
            RuntimeWarning,
            stacklevel=2,
        )


def _end(pool: ProcessPoolExecutor, owner: int) -> None:
    if os.getpid() == owner:
        pool.shutdown(cancel_futures=True)


_own: dict[str, Any] = {}
"""Of a worker: the reader."""


def _begin(reader: Any) -> None:
    """Make this process a worker."""
    # An interruption from the keyboard is for the training process; handlers of the caller's belong to the run.
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    reader.device = torch.device("cpu")
    _own["reader"] = reader
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process once its parent is gone, which the queue of requests does not show."""
    while os.getppid() == parent:
        time.sleep(_PATIENCE)
    os._exit(0)


def _read(seed: bytes, places: tuple[int, ...]) -> Answer:
    try:
        return batches.named(_own["reader"].read(places, seed))
    except Exception as cause:  # noqa: BLE001 - whatever a data set raises; its words may show private values
        return type(cause).__name__
