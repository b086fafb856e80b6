"""Reading ahead: the batches of later steps, read in other processes while this one takes a step.

Not in a thread. Generators of torch, NumPy and Python belong to a whole process, and both reading and the step set them
from the run's key: a thread that read while the model drew dropout masks would change the masks, and draw other
numbers itself. A process has generators of its own, so that a batch is the same wherever it is read.

Nothing of a run moves here. What is asked for is a function of the places and the seed of a later step; the step draws
its batch as it would without reading ahead, and takes what was read only if it is for the same places and seed. After a
fork of the run's keys it is for others, and is dropped.
"""

from __future__ import annotations

import os
import signal
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import multiprocessing

from dpcore.torch.data import batches

_PATIENCE = 2.0
"""Seconds after which a worker looks whether the process that it reads for is still there."""

Request = tuple[bytes, tuple[int, ...]]
"""The seed and the places: what a batch is a function of. Secret."""

Answer = dict[str, torch.Tensor]
"""The tensors of a batch by their names."""


class Ahead:
    """Up to `count` worker processes, each with a copy of the data set from when it began.

    They begin at the first request, in the way that `torch.multiprocessing` does on this system, as the workers of
    torch's own DataLoader do. What they cannot do is done by the caller, after a warning. `reader` has the caller's
    `read`.
    """

    def __init__(self, reader: Any, count: int) -> None:
        self._reader, self._count = reader, count
        self._workers: list[_Worker] = []
        self._asked: dict[Request, tuple[_Worker, int]] = {}
        self._process, self._broken = os.getpid(), False

    def ask(self, places: Sequence[int], seed: bytes) -> None:
        """Let a batch be read, unless it is on its way."""
        request = seed, tuple(places)
        if os.getpid() != self._process:  # forked: the workers are the parent's
            self._process, self._workers, self._asked = os.getpid(), [], {}
        if self._broken or request in self._asked:
            return
        while len(self._asked) > self._count:  # the run went another way, and nobody will come for the oldest
            del self._asked[next(iter(self._asked))]
        try:
            if len(self._workers) < self._count:
                self._workers.append(_Worker(self._reader))
            worker = min(self._workers, key=lambda worker: worker.waiting)
            self._asked[request] = worker, worker.ask(request)
        except BaseException as cause:  # no process to be had, a data set that cannot be sent there, half a message
            self._give_up(type(cause).__name__)
            if not isinstance(cause, Exception):
                raise

    def take(self, places: Sequence[int], seed: bytes) -> Answer | None:
        """Return a batch that was asked for, or None if it was not, or could not be read."""
        if os.getpid() != self._process:
            return None
        worker, number = self._asked.pop((seed, tuple(places)), (None, 0))
        if worker is None:
            return None
        try:
            answer = worker.answer(number)
        except BaseException as cause:  # the worker ended, or an interruption may have left half of a message
            self._give_up(type(cause).__name__)
            if not isinstance(cause, Exception):
                raise
            return None
        if isinstance(answer, str):
            self._give_up(answer)
            return None
        return answer

    def _give_up(self, reason: str) -> None:
        """End all workers for good."""
        workers, self._workers, self._asked, self._broken = self._workers, [], {}, True
        for worker in workers:
            worker.end()
        warnings.warn(
            f"prefetch: reading ahead ended ({reason}); from here on batches are read when they are needed",
            RuntimeWarning,
            stacklevel=2,
        )


class _Worker:
    """One process that reads, in the order in which it was asked."""

    def __init__(self, reader: Any) -> None:
        context = multiprocessing.get_context()
        self._connection, theirs = context.Pipe()
        arguments = reader, theirs, self._connection, os.getpid()
        process = context.Process(target=_serve, args=arguments, name="dpcore-data", daemon=True)
        with warnings.catch_warnings():
            # Python warns of every fork beside threads, which do not live on in the worker.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
            process.start()
        theirs.close()
        self._sent = self._answered = 0
        self.end = weakref.finalize(self, _end, process, self._connection, os.getpid())

    @property
    def waiting(self) -> int:
        """Requests without an answer."""
        return self._sent - self._answered

    def ask(self, request: Request) -> int:
        """Send a request, and return its number."""
        self._connection.send(request)
        self._sent += 1
        return self._sent

    def answer(self, number: int) -> Answer | str:
        """Return the answer to a request, passing over those before it; why there is none if it could not be read."""
        while True:
            answer: Answer | str = self._connection.recv()
            self._answered += 1
            if self._answered == number:
                return answer


def _end(process: Any, connection: Any, owner: int) -> None:
    connection.close()
    if os.getpid() == owner:
        process.terminate()
        process.join()


def _serve(reader: Any, connection: Any, others: Any, parent: int) -> None:
    """Read what is asked for until nobody asks any more."""
    others.close()  # or the end of the other process would not show here
    # An interruption from the keyboard is for the training process; handlers of the caller's belong to the run.
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    reader.device = torch.device("cpu")
    while True:
        while not connection.poll(_PATIENCE):
            if os.getppid() != parent:
                return
        try:
            seed, places = connection.recv()
        except (EOFError, OSError):
            return
        try:
            connection.send(batches.named(reader.read(places, seed)))
        except OSError:  # nobody is there any more
            return
        except Exception as cause:  # noqa: BLE001 - whatever a data set raises; its words may show private values
            connection.send(type(cause).__name__)
