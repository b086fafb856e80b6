"""The runs of a comparison, each into a folder of its own as of ``dpcore train``: here, or in other processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from dpcore.cli.datasets import Dataset, load
from dpcore.cli.interrupt import Interruption
from dpcore.cli.train.run_folder import RunFolder, locked
from dpcore.cli.train.settings import Settings
from dpcore.errors import DpcoreError

# With several processes side by side, threads inside of each only take turns.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Task(NamedTuple):
    """A run to make: its settings and folder, the ledger that pays for it, and what the ledger calls it."""

    settings: Settings
    path: Path
    ledger: Path | None
    name: str


class Ended(NamedTuple):
    """How long the training of a run took, and why a ledger's budget ended it, if it did."""

    seconds: float
    budget: str


def train_once(task: Task, dataset: Dataset, interruption: Interruption, tell: Callable[[int, int], None]) -> Ended:
    """Make one run, and tell of its steps."""
    from dpcore.cli.train.run import train_into
    from dpcore.cli.train.training import Training

    settings = task.settings.resolved(len(dataset))
    training = Training(settings, dataset, task.ledger, task.name)
    training.private.begin()
    folder = RunFolder(task.path)
    folder.write_config(settings.to_dict(), task.ledger, training.statement(0).software)
    with locked(folder.path):
        outcome = train_into(training, folder, interruption, tell)
    return Ended(outcome.seconds, outcome.budget)


class _Remote(Interruption):
    """What the parent process has been told by a signal, or this one by SIGTERM."""

    def __init__(self, number: Any) -> None:
        super().__init__()
        self._number = number
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)

    def __bool__(self) -> bool:
        if self.signal is None and self._number.value:
            self.signal = signal.Signals(self._number.value)
        return self.signal is not None


class Worker:
    """A process of its own, single-threaded, that makes one run after the other: it imports torch once, not each time.

    `stop` is shared, as `shared_stop` returns it: the number of the signal that asks to stop, 0 while there is none.
    """

    def __init__(self, stop: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # A daemon: it does not outlive this process, however that ends.
        self._process = context.Process(target=_work, args=(theirs, stop), daemon=True)
        with _environment(dict.fromkeys(_ONE_THREAD, "1")), _held_back(signal.SIGINT):
            self._process.start()
        theirs.close()

    def begin(self, task: Task) -> None:
        """Let it make a run; one that has died meanwhile says so in `receive`."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(task)

    def receive(self) -> tuple[str, Any]:
        """Return the next message: ("steps", (taken, planned)), ("done", Ended), ("failed" or "died", words)."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode or 0
            words = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
            return "died", words
        return kind, content

    def close(self) -> None:
        """Let it end once it has nothing to do; this process does not wait for that."""
        self.connection.close()


def shared_stop() -> Any:
    """Return an integer that all processes see."""
    return multiprocessing.get_context("spawn").Value("i", 0)


def _work(connection: Connection, stop: Any) -> None:
    # Ctrl-C reaches the whole group of processes; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    interruption, dataset = _Remote(stop), None
    try:
        while True:
            task = connection.recv()
            try:
                if dataset is None:  # the same for all runs of a comparison
                    dataset = load(task.settings.data, task.settings.data_dir)
                ended = train_once(task, dataset, interruption, lambda *steps: connection.send(("steps", steps)))
                connection.send(("done", ended))
            except BrokenPipeError:
                raise
            except (DpcoreError, OSError) as error:
                connection.send(("failed", str(error)))
    except EOFError:
        return
    except (BrokenPipeError, ConnectionResetError):
        # The parent is gone: nobody would count the run as one of the comparison from here on.
        sys.exit(1)


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Block a signal while the block runs; what is started in it has it blocked for good, this process not."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
