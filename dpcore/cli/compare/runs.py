"""The runs of a comparison, each into a folder of its own as of ``dpcore train``, with a bar for each.

One after the other in this process, or several at a time in others.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dpcore.accounting import Adjacency, Composed, Event
from dpcore.cli.compare.comparison import Comparison, Run
from dpcore.cli.datasets import Dataset, load
from dpcore.cli.interrupt import Interruption
from dpcore.cli.output import remark
from dpcore.cli.train.run_folder import (
    COMPARISON,
    RUNS,
    RunFolder,
    check_folder,
    checkpoint_of,
    holds,
    locked,
    read_run,
)
from dpcore.cli.train.settings import Settings
from dpcore.cli.train.train import check_beside, train_into
from dpcore.errors import BudgetError, DataError, DpcoreError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.ledger.privacy_filter import PrivacyFilter, order_for
from dpcore.plan.plan import Plan
from dpcore.spec.canonical import plain, read_json_file
from dpcore.statement.statement import Statement
from dpcore.statement.text import counted, format_number

# The part of a comparison that a ledger's budget pays for: told before the first run, and asked before each.


def ledger_for(path: Path, events: Sequence[Event]) -> Ledger:
    """Open the ledger; PrivacyError where it would refuse one of these plans' events after others were paid for."""
    ledger = Ledger.open(path)
    for event in events:
        ledger.filter.charge(event)  # refuses what it does not cover
    kinds = {str(run.adjacency) for run in ledger.runs() if run.adjacency is not None}
    kinds |= {str(event.adjacency) for event in events if event.adjacency is not None}
    replace = Adjacency.REPLACE_ONE.value
    if replace in kinds and len(kinds) > 1:
        raise PrivacyError(
            f"ledger={str(path)!r}: its runs and those of this comparison would be under {', '.join(sorted(kinds))}, "
            f"and {replace} does not add up with any other; give such runs a ledger of their own"
        )
    return ledger


def shortage(ledger: Ledger, events: Sequence[Event]) -> str | None:
    """Return a sentence where the budget ends before runs of these events, made one after the other; or None."""
    paid = whole_runs(ledger, events)
    if paid == len(events):
        return None
    return (
        f"the ledger's budget pays for {paid or 'none'} of the {counted(len(events), 'run')} to come, made one "
        "after the other; the comparison stops before the first that it does not pay for, and keeps those before it"
    )


class Payer:
    """A ledger that is asked before each run whether it pays for all of it: part of a run is spent for nothing.

    Other commands may take of the ledger meanwhile; a run that they leave too little for ends early.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        # By the name of a run under way: its event, and the runs of that name that the ledger had before.
        self._under_way: dict[str, tuple[Event, set[str]]] = {}

    def pays_for(self, event: Event) -> bool:
        """Whether the budget pays for a run of this event, with those under way coming to their end."""
        if self.ledger.budget is None:
            return True
        to_come, rest = [], 0.0
        records, fixed = self.ledger.runs(), self.ledger.total().fixed_runs
        for name, (whole, before) in self._under_way.items():
            found = [record for record in records if record.name == name and record.run_id not in before]
            if not found or not found[0].releases:
                to_come.append(whole)
            elif found[0].run_id not in fixed:  # the plans of those are kept free as they are
                rest += self.ledger.filter.charge(whole) - found[0].charge
        return whole_runs(self.ledger, [*to_come, event], rest) == len(to_come) + 1

    def begin(self, name: str, event: Event) -> None:
        """Note that a run begins, which the ledger will know by this name."""
        self._under_way[name] = event, {record.run_id for record in self.ledger.runs() if record.name == name}

    def end(self, name: str) -> None:
        """Note that a run has ended: the ledger holds what it came to."""
        self._under_way.pop(name, None)


def whole_runs(ledger: Ledger, events: Sequence[Event], rest: float = 0.0) -> int:
    """Return how many runs of these events come to their end, one after the other and from the first on.

    As `dpcore.ledger.allowance` decides: what is begun before the first row is fixed beforehand if the budget
    affords it, and settles the filter's order; all that comes later is held to the filter. `rest` is what runs under
    way still add to the filter's sum.
    """
    if ledger.budget is None or not events:
        return len(events)
    left = ledger.remaining()
    chosen, spent, limit = left.filter, left.spent + rest, left.limit
    if left.plans is not None:
        if not left.fits(events[0]):
            return 0
        fixed = Composed((left.plans, events[0]))
        if ledger.order is None:
            chosen = PrivacyFilter(chosen.kind, order_for(fixed, ledger.budget))
            limit = chosen.limit(*ledger.budget)
        if chosen.charge(fixed) > limit:
            return 1
        spent = chosen.charge(left.plans)
    for count, event in enumerate(events):
        spent += chosen.charge(event)
        if spent > limit:
            return count
    return len(events)


# The runs of a comparison, on disk at every moment: results.json lists them, and each has a folder as of `train`.
#
# What a run spent is what its own folder states, which at every moment is all that it released, or more. Durations are
# apart, in timing.json: how long a run takes tells the sizes of its batches, which are secret under Poisson sampling.


COMPLETE, STOPPED, UNDER_WAY, NOTHING = "complete", "stopped", "under way", "ended before its first step"
TIMING_NOTE = (
    "Not covered by the guarantee: how long a run takes tells the sizes of its batches, which are secret under Poisson "
    "sampling. On private data, do not publish this file."
)


class Record:
    """One run that was begun, and what its folder says of it; `seconds` is how long it took."""

    def __init__(self, run: Run, path: Path, seconds: float | None = None) -> None:
        self.run, self.path, self.seconds = run, path, seconds
        self.ended = False
        self.statement: Statement | None = None
        self.evaluations: list[dict[str, Any]] = []

    def read(self) -> None:
        """Read the folder of a run that has ended, in good order or not."""
        self.statement, self.evaluations = read_run(self.path)
        self.ended = True

    @property
    def status(self) -> str:
        """`COMPLETE`, `STOPPED` early or killed, `UNDER_WAY`, or `NOTHING` where no step was taken."""
        stated = self.statement
        if stated is None:
            return NOTHING if self.ended else UNDER_WAY
        # While a run is under way its statement has a note.
        return COMPLETE if stated.steps_taken == stated.steps_planned and not stated.note else STOPPED

    @property
    def accuracy(self) -> list[float]:
        """Held-out accuracy at each evaluation."""
        return [item["test_accuracy"] for item in self.evaluations]


class Log:
    """The runs of a comparison, with those of an earlier call of the same command."""

    def __init__(self, folder: RunFolder, comparison: Comparison, records: list[Record]) -> None:
        self.folder, self.comparison, self.records = folder, comparison, records
        self.summary: dict[str, Any] | None = None

    @classmethod
    def open(cls, path: Path, comparison: Comparison, ledger: Path | None, *, overwrite: bool) -> Log:
        """Begin a comparison in a folder, or take up the one with the same settings that is there; else DataError."""
        records = earlier(path, comparison, ledger, overwrite=overwrite)
        if records is not None:
            return cls(RunFolder(path, kind=COMPARISON, existing=True), comparison, records)
        folder = RunFolder(path, overwrite=overwrite, kind=COMPARISON)
        folder.write_config(_settings(comparison), ledger)
        log = cls(folder, comparison, [])
        log.write()
        return log

    def begin(self, run: Run) -> Record:
        """Write down that a run begins, and where."""
        name = re.sub("[^a-z0-9]+", "-", run.contestant.lower()).strip("-")
        number, parent = len(self.records) + 1, self.folder.path / RUNS
        while (path := parent / f"{number:03d}-{name}").exists() or checkpoint_of(path).exists():
            number += 1
        self.records.append(Record(run, path))
        self.write()
        return self.records[-1]

    def end(self, record: Record, seconds: float) -> None:
        """Write down that a run has ended."""
        record.seconds = round(seconds, 3)
        record.read()
        self.write()

    def complete(self) -> dict[Run, Record]:
        """Return the complete runs."""
        return {record.run: record for record in self.records if record.status == COMPLETE}

    def accuracies(self) -> dict[Run, float]:
        """Return held-out accuracy at the end of each complete run."""
        return {run: record.accuracy[-1] for run, record in self.complete().items()}

    def due(self) -> list[Run]:
        """Return the runs that may begin now."""
        return self.comparison.due(self.accuracies())

    def events(self) -> list[Event]:
        """Return what every run released or may have released, those that were stopped or killed too."""
        return [Event.from_dict(record.statement.event) for record in self.records if record.statement is not None]

    def write(self) -> None:
        """Put both files in place."""
        base = self.folder.path
        seconds = {str(record.path.relative_to(base)): record.seconds for record in self.records if record.seconds}
        self.folder.write_json("timing.json", {"note": TIMING_NOTE, "seconds": seconds})
        runs = [
            {**record.run._asdict(), "folder": str(record.path.relative_to(base)), "status": record.status}
            for record in self.records
        ]
        self.folder.write_json("results.json", {"format": 2, "summary": self.summary, "runs": runs})


def earlier(path: Path, comparison: Comparison, ledger: Path | None, *, overwrite: bool) -> list[Record] | None:
    """Return the runs of the comparison with the same settings in a folder; None where a new one may begin.

    DataError where neither can be; nothing is made and nothing is deleted.
    """
    if (path / "config.json").is_file():
        with locked(path):
            pass
    if overwrite or not holds(path, COMPARISON):
        check_folder(path, overwrite=overwrite, kind=COMPARISON)
        return None
    held, records = _held(path)
    paid = held.pop("ledger", None)
    if paid is not None and ledger is None:
        raise DataError(
            f"ledger=None: the runs in {path} are paid for by the ledger {paid}; add --ledger {paid}, or name another "
            "folder"
        )
    difference = _difference(held, _settings(comparison))
    if difference:
        raise DataError(
            f"out={str(path)!r}: holds a comparison with other settings ({difference}); name another folder, or "
            "add --overwrite to begin anew"
        )
    return records


def _settings(comparison: Comparison) -> dict[str, Any]:
    return dict(json.loads(json.dumps(plain(comparison.to_dict()))))


def _held(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Return the settings and the runs of the comparison in a folder."""
    try:
        settings = read_json_file(path / "config.json")["settings"]
        if not (path / "results.json").exists():
            return settings, []
        listed = read_json_file(path / "results.json")["runs"]
        timing = path / "timing.json"
        seconds = read_json_file(timing)["seconds"] if timing.exists() else {}
        records = []
        for item in listed:
            run = Run(*(item[name] for name in Run._fields))
            records.append(Record(run, path / item["folder"], seconds.get(item["folder"])))
            records[-1].read()
            if item["status"] in (COMPLETE, STOPPED) and records[-1].statement is None:
                raise DataError(
                    f"out={str(path)!r}: the statement of its run {item['folder']} is gone, so that nothing says what "
                    "it spent; put the folder back, or add --overwrite to begin anew"
                )
    except (ValueError, KeyError, TypeError) as cause:
        raise DataError(
            f"out={str(path)!r}: its files cannot be read ({cause}); add --overwrite to begin anew"
        ) from cause
    return settings, records


def _difference(held: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Name the first setting that differs; empty where all are equal."""
    for key in {**held, **asked}:
        before, now = held.get(key), asked.get(key)
        if before == now:
            if isinstance(now, dict) and list(before or {}) != list(now):
                return f"{key} stand in another order"
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            return f"{key}: {_difference(before, now)}"
        return f"{key}: {json.dumps(before)} there, {json.dumps(now)} here"
    return ""


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
