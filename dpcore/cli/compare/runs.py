"""The runs of a comparison, each into a folder of its own as of ``dpcore train``, with a bar for each.

One after the other in this process, or several at a time in others.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dpcore.accounting import Event
from dpcore.cli.compare.budget import Payer
from dpcore.cli.compare.comparison import Comparison, Run
from dpcore.cli.compare.log import COMPLETE, Log, Record
from dpcore.cli.datasets import Dataset, load
from dpcore.cli.interrupt import Interruption
from dpcore.cli.output import remark
from dpcore.cli.train.run import check_beside, train_into
from dpcore.cli.train.run_folder import RunFolder, locked
from dpcore.cli.train.settings import Settings
from dpcore.errors import BudgetError, DpcoreError
from dpcore.plan.plan import Plan
from dpcore.statement.text import counted, format_number

_SECONDS_BETWEEN_LOOKS = 0.25
# With several processes side by side, threads inside of each only take turns.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


Plans = Mapping[tuple[str, float, str], Plan]
"""What a run of a contestant, at an epsilon and in a role, is to do."""


def events_of(plans: Plans, runs: Iterable[Run]) -> list[Event]:
    """Return what each of the runs releases."""
    return [plans[run.contestant, run.epsilon, run.role].event for run in runs]


def check_plans(comparison: Comparison, dataset: Dataset, ledger: Path | None) -> None:
    """Refuse what is known to fail of the runs, without torch."""
    check_beside(comparison.shared, ledger)
    for run in comparison.examples:
        with _naming(run):
            comparison.settings_for(run).plan(len(dataset))


def preview(comparison: Comparison, dataset: Dataset, ledger: Path | None) -> Plans:
    """Build one run of every plan, so that nothing is refused after hours of training.

    What the first has to remark on the data, and on the ledger that is to pay, holds for all.
    """
    from dpcore.cli.train.training import Training

    plans: dict[tuple[str, float, str], Plan] = {}
    for run in comparison.examples:
        with _naming(run):
            built = Training(comparison.settings_for(run), dataset, None if plans else ledger)
        for sentence in () if plans else built.remarks:
            remark(sentence)
        plans[run.contestant, run.epsilon, run.role] = built.plan
    return plans


@contextmanager
def _naming(run: Run) -> Iterator[None]:
    """Let a refusal name the contestant."""
    try:
        yield
    except DpcoreError as error:
        raise type(error)(f"contestant {run.contestant!r}: {error}") from error


class Display(Progress):
    """A bar for all runs and one for each that is under way; on no terminal, a line for each that ended."""

    def __init__(self, console: Console, complete: int, total: int) -> None:
        columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn()
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._complete, self._total = complete, total
        self._all = self.add_task(self._words, total=total, completed=complete)
        self._bars: dict[Run, TaskID] = {}

    @property
    def _words(self) -> str:
        return f"{self._complete} of {counted(self._total, 'run')}"

    def begin(self, run: Run) -> None:
        """Add the bar of a run."""
        self._bars[run] = self.add_task(f"  {described(run)}", total=None)

    def steps(self, run: Run, taken: int, planned: int) -> None:
        """Move the bar of a run."""
        self.update(self._bars[run], completed=taken, total=planned)

    def end(self, record: Record) -> None:
        """Remove the bar of a run and say what it came to."""
        self.remove_task(self._bars.pop(record.run))
        if record.status != COMPLETE:
            return
        self._complete += 1
        self.update(self._all, completed=self._complete, description=self._words)
        accuracy = f"held-out accuracy {100 * record.accuracy[-1]:.2f}%"
        self.console.print(f"{self._words}: {described(record.run)}: {accuracy}, {record.seconds or 0:.1f} s")


def described(run: Run) -> str:
    """Return a run in words."""
    return (
        f"{run.contestant}, epsilon {format_number(run.epsilon)}, {run.role}, lr {format_number(run.lr)}, "
        f"seed {run.seed}"
    )


def make_runs(
    log: Log,
    dataset: Dataset,
    jobs: int,
    display: Display,
    interruption: Interruption,
    plans: Plans,
    payer: Payer | None,
) -> None:
    """Make all runs that are not complete, until a signal asks to stop.

    Where a run fails, or a ledger's budget does not pay for the next, what was complete before stays in the log.
    """

    def begin(run: Run) -> tuple[Record, Task]:
        name, (event,) = described(run), events_of(plans, [run])
        if payer is not None:
            if not payer.pays_for(event):
                raise BudgetError(
                    f"the ledger's budget does not pay for the whole of the next run, {name}; it was not begun"
                )
            payer.begin(name, event)
        record = log.begin(run)
        display.begin(run)
        ledger = None if payer is None else payer.ledger.path
        return record, Task(log.comparison.settings_for(run), record.path, ledger, name)

    def end(record: Record, seconds: float) -> None:
        log.end(record, seconds)
        display.end(record)
        if payer is not None:
            payer.end(described(record.run))

    if jobs > 1:
        _side_by_side(log, jobs, display, interruption, begin, end)
        return
    while not interruption and (due := log.due()):
        record, task = begin(due[0])
        ended = train_once(task, dataset, interruption, partial(display.steps, record.run))
        end(record, ended.seconds)
        if ended.budget:
            raise BudgetError(f"the run {task.name} was ended: {ended.budget}")


def _side_by_side(
    log: Log,
    jobs: int,
    display: Display,
    interruption: Interruption,
    begin: Callable[[Run], tuple[Record, Task]],
    end: Callable[[Record, float], None],
) -> None:
    stop = shared_stop()
    active: dict[Any, tuple[Record, Worker]] = {}
    idle: list[Worker] = []
    failure, over_budget, unpaid = "", False, ""
    while True:
        if interruption.signal is not None:
            stop.value = int(interruption.signal)
        if not stop.value and not unpaid:
            under_way = {record.run for record, _ in active.values()}
            waiting = [run for run in log.due() if run not in under_way]
            for run in waiting[: jobs - len(active)]:
                try:
                    record, task = begin(run)
                except BudgetError as cause:  # those under way were paid for, and come to their end
                    unpaid = str(cause)
                    break
                worker = idle.pop() if idle else Worker(stop)
                worker.begin(task)
                active[worker.connection] = (record, worker)
        if not active:
            break
        for connection in wait(list(active), timeout=_SECONDS_BETWEEN_LOOKS):
            record, worker = active[connection]
            kind, content = worker.receive()
            if kind == "steps":
                display.steps(record.run, *content)
                continue
            del active[connection]
            if kind != "died":
                idle.append(worker)
            name = f"the run {described(record.run)}"
            if kind == "done":
                end(record, content.seconds)
                if content.budget:
                    failure, over_budget = failure or f"{name} was ended: {content.budget}", True
            elif not interruption:
                failure = failure or f"{name} {'failed: ' if kind == 'failed' else ''}{content}"
            if failure:
                # The others end after their step, with true statements; then the failure is told.
                stop.value = int(signal.SIGTERM)
    for worker in idle:
        worker.close()
    if over_budget:
        raise BudgetError(failure)
    if failure:
        raise DpcoreError(f"{failure}; the same command goes on from the runs that are complete")
    if unpaid:
        raise BudgetError(unpaid)


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
