"""One run of a comparison, here or in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from dpcore.cli.compare.log import COMPLETE, STOPPED
from dpcore.cli.datasets import Dataset, load
from dpcore.cli.train.callbacks import EpochReleased, StepReleased
from dpcore.cli.train.interrupt import Interruption
from dpcore.cli.train.settings import Settings
from dpcore.errors import DpcoreError
from dpcore.spec.canonical import plain
from dpcore.statement.statement import Statement

# With several processes side by side, threads inside of each only take turns.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "DPCORE_NUM_THREADS")
_SECONDS_BETWEEN_REPORTS = 0.25

load_once = lru_cache(maxsize=1)(load)


class Steps:
    """A callback that tells a function of steps, a few times a second.

    Parameters
    ----------
    tell : callable
        (steps taken, steps planned) -> None.
    """

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._tell, self._last = tell, 0.0

    def on_step(self, released: StepReleased) -> None:
        """Tell, unless that was done just now."""
        now = time.monotonic()
        if now - self._last > _SECONDS_BETWEEN_REPORTS or released.step == released.steps_planned:
            self._last = now
            self._tell(released.step, released.steps_planned)

    def on_epoch(self, released: EpochReleased) -> None:
        """Do nothing."""

    def on_end(self, statement: Statement) -> None:
        """Do nothing."""


def train_once(
    settings: Settings,
    dataset: Dataset,
    interruption: Interruption,
    tell: Callable[[int, int], None],
    ledger: Path | None = None,
    run_name: str = "",
) -> dict[str, Any]:
    """Train once and return what is kept of it: released numbers, and the time it took.

    Parameters
    ----------
    settings : Settings
    dataset : Dataset
    interruption : Interruption
        Looked at after each step.
    tell : callable
        (steps taken, steps planned) -> None.
    ledger : Path, optional
        Pays for the steps.
    run_name : str
        What the ledger calls the run.
    """
    from dpcore.cli.train.training import Training

    training = Training(settings, dataset, ledger, run_name)
    begun = time.perf_counter()
    outcome = training.run([Steps(tell)], interruption)
    seconds = time.perf_counter() - begun
    statement, evaluations = outcome.statement, outcome.evaluations
    result = {
        "status": COMPLETE if statement.steps_taken == statement.steps_planned else STOPPED,
        "epochs": [item.epoch for item in evaluations],
        "test_accuracy": [item.test_accuracy for item in evaluations],
        "test_loss": [item.test_loss for item in evaluations],
        "epsilon_spent": [item.epsilon for item in evaluations],
        "event": statement.event,
        "statement": statement.to_dict(),
        "seconds": seconds,
        **({"budget": outcome.budget} if outcome.budget else {}),
    }
    return dict(plain(result))


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


class Process:
    """A run in a process of its own, single-threaded.

    Parameters
    ----------
    settings : Settings
    stop : shared int
        As `shared_stop` returns it; the number of the signal that asks to stop, 0 while there is none.
    ledger : Path, optional
        Pays for the steps.
    run_name : str
        What the ledger calls the run.
    """

    def __init__(self, settings: Settings, stop: Any, ledger: Path | None = None, run_name: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe(duplex=False)
        # A daemon: it does not outlive this process, however that ends.
        self._process = context.Process(target=_work, args=(settings, theirs, stop, ledger, run_name), daemon=True)
        with _environment(dict.fromkeys(_ONE_THREAD, "1")), _held_back(signal.SIGINT):
            self._process.start()
        theirs.close()

    def receive(self) -> tuple[str, Any]:
        """Return the next message: ("steps", (taken, planned)), ("done", result), ("failed" or "died", words)."""
        try:
            kind, content = self.connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode or 0
            words = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
            return "died", words
        if kind != "steps":
            self._process.join()
        return kind, content


def shared_stop() -> Any:
    """Return an integer that all processes see."""
    return multiprocessing.get_context("spawn").Value("i", 0)


def _work(settings: Settings, connection: Connection, stop: Any, ledger: Path | None, run_name: str) -> None:
    # Ctrl-C reaches the whole group of processes; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    try:
        dataset = load(settings.data, settings.data_dir)
        tell = lambda *steps: connection.send(("steps", steps))  # noqa: E731
        result = train_once(settings, dataset, _Remote(stop), tell, ledger, run_name)
        connection.send(("done", result))
    except BrokenPipeError:
        # The parent is gone: nobody would write down what is spent from here on.
        sys.exit(1)
    except DpcoreError as error:
        connection.send(("failed", str(error)))


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Block a signal while the block runs; what is started in it has it blocked for good, this process not."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
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
