"""The runs of a comparison, each into a folder of its own: one after the other here, or several at a time elsewhere."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpcore.accounting import Adjacency, Composed, Event
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
from dpcore.cli.train.settings import SETTINGS, Settings, settings_from
from dpcore.cli.train.train import GONE, check_beside
from dpcore.errors import ArgumentError, BudgetError, DataError, DpcoreError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.ledger.privacy_filter import PrivacyFilter, order_for
from dpcore.plan.plan import Plan
from dpcore.spec.canonical import plain, read_json_file
from dpcore.statement.statement import Statement
from dpcore.statement.text import format_number

SEARCH, FINAL = "search", "final"
# Seeds of the search for learning rates start here, so that no final run begins where a search run began.
FIRST_SEARCH_SEED = 1000
# The same for all contestants, or decided by the comparison itself.
SAME_FOR_ALL = frozenset(
    ("data", "data_dir", "model", "epsilon", "delta", "noise_multiplier", "seed", "backend", "tensorboard")
)


class Run(NamedTuple):
    """One run of a comparison."""

    contestant: str
    epsilon: float
    role: str
    lr: float
    seed: int


@dataclass(frozen=True)
class Contestant:
    """A method with settings of its own, none of `SAME_FOR_ALL`, and the learning rates it may try.

    One rate needs no search, none takes the default of the update rule.
    """

    name: str
    settings: dict[str, Any]
    lr: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A whole comparison: contestants of different names, each of which meets every epsilon with `seeds` final runs.

    `search_seeds` are runs of each learning rate of a grid. `common` are settings of all contestants; a contestant's
    own win.
    """

    contestants: tuple[Contestant, ...]
    epsilon: tuple[float, ...]
    common: dict[str, Any] = field(default_factory=dict)
    seeds: int = 3
    search_seeds: int = 1

    def __post_init__(self) -> None:
        if not self.contestants:
            raise ArgumentError("methods=(): name at least one method, or contestants in a file with --config")
        if len(self._named) < len(self.contestants):
            raise ArgumentError("contestants: two have the same name; each needs a name of its own")
        if not self.epsilon:
            raise ArgumentError("epsilon=None: give at least one, such as --epsilon 1,8")
        for name, values in (
            ("epsilon", self.epsilon),
            *((f"lr of {item.name}", item.lr) for item in self.contestants),
        ):
            if len(set(values)) < len(values):
                raise ArgumentError(f"{name}={values!r}: has a value twice")
        if not 1 <= self.seeds <= FIRST_SEARCH_SEED:
            raise ArgumentError(f"seeds={self.seeds!r}: must lie between 1 and {FIRST_SEARCH_SEED}")
        if self.search_seeds < 1:
            raise ArgumentError(f"search_seeds={self.search_seeds!r}: must be at least 1")
        for contestant in self.contestants:
            for rate in self.grid(contestant.name):
                if not rate > 0:
                    raise ArgumentError(f"lr of {contestant.name}={rate!r}: must be greater than 0")

    @cached_property
    def _named(self) -> dict[str, Contestant]:
        return {item.name: item for item in self.contestants}

    @cached_property
    def shared(self) -> Settings:
        """The settings of the first contestant, whose data, model, delta and backend are those of all."""
        return self._settings(self.contestants[0], self.epsilon[0], None, 0)

    def grid(self, contestant: str) -> tuple[float, ...]:
        """Return the learning rates a contestant tries, in increasing order."""
        named = self._named[contestant]
        return tuple(sorted(named.lr)) or (self._settings(named, self.epsilon[0], None, 0).learning_rate,)

    def settings_for(self, run: Run) -> Settings:
        """Return what `dpcore train` would be given for this run."""
        return self._settings(self._named[run.contestant], run.epsilon, run.lr, run.seed)

    def search(self, contestant: str, epsilon: float) -> list[Run]:
        """Return the runs that decide the learning rate; none where there is nothing to choose."""
        grid = self.grid(contestant)
        if len(grid) == 1:
            return []
        seeds = range(FIRST_SEARCH_SEED, FIRST_SEARCH_SEED + self.search_seeds)
        return [Run(contestant, epsilon, SEARCH, lr, seed) for lr in grid for seed in seeds]

    def final(self, contestant: str, epsilon: float, lr: float) -> list[Run]:
        """Return the runs that are compared."""
        return [Run(contestant, epsilon, FINAL, lr, seed) for seed in range(self.seeds)]

    def chosen(self, contestant: str, epsilon: float, accuracy: Mapping[Run, float]) -> float | None:
        """Return the learning rate with the best mean held-out accuracy, or None while the search is not complete.

        Of equally good ones the smallest is taken.
        """
        grid, search = self.grid(contestant), self.search(contestant, epsilon)
        if not search:
            return grid[0]
        if any(run not in accuracy for run in search):
            return None
        means = {lr: float(np.mean([accuracy[run] for run in search if run.lr == lr])) for lr in grid}
        return max(grid, key=lambda lr: (means[lr], -lr))

    def due(self, accuracy: Mapping[Run, float]) -> list[Run]:
        """Return the runs that may begin now, where those with an accuracy are complete."""
        ahead = self.ahead(accuracy)
        return [r for r in ahead if r.role == SEARCH or self.chosen(r.contestant, r.epsilon, accuracy) is not None]

    def ahead(self, accuracy: Mapping[Run, float]) -> list[Run]:
        """Return all runs to come, in the order in which they are made one after the other.

        Those whose learning rate is not chosen yet stand there with the smallest of their grid.
        """
        wanted: list[Run] = []
        for epsilon in self.epsilon:
            for contestant in self._named:
                lr = self.chosen(contestant, epsilon, accuracy)
                wanted += self.search(contestant, epsilon)
                wanted += self.final(contestant, epsilon, self.grid(contestant)[0] if lr is None else lr)
        return [run for run in wanted if run not in accuracy]

    @property
    def total(self) -> int:
        """The number of runs."""
        return len(self.epsilon) * sum(len(self.search(name, self.epsilon[0])) + self.seeds for name in self._named)

    @property
    def examples(self) -> list[Run]:
        """One run of each plan that occurs: contestant, epsilon and role decide it, learning rate and seed do not."""
        pairs = [(name, epsilon) for epsilon in self.epsilon for name in self._named]
        searches = [run for name, epsilon in pairs for run in self.search(name, epsilon)[:1]]
        return searches + [self.final(name, epsilon, self.grid(name)[0])[0] for name, epsilon in pairs]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values, in the form of a configuration file."""
        own = {key: value for key, value in asdict(self).items() if key not in ("contestants", "common")}
        tables = {item.name: {**item.settings, "lr": list(self.grid(item.name))} for item in self.contestants}
        return {"backend": self.shared.backend, **self.common, **own, "contestants": tables}

    def words(self, contestant: str) -> str:
        """Return the settings of a contestant that differ among them; no learning rates."""
        known = {item.name: self._settings(item, self.epsilon[0], None, 0) for item in self.contestants}
        own = [key for key in SETTINGS if key not in (*SAME_FOR_ALL, "lr", "method")]
        differs = [key for key in own if len({repr(getattr(s, key)) for s in known.values()}) > 1]
        values = {key: getattr(known[contestant], key) for key in differs}
        return ", ".join(
            f"{key.replace('_', ' ')} {_said(value)}" for key, value in values.items() if value is not None
        )

    def method(self, contestant: str) -> str:
        """Return the method's name."""
        return str(self._named[contestant].settings["method"])

    def _settings(self, contestant: Contestant, epsilon: float, lr: float | None, seed: int) -> Settings:
        try:
            return settings_from({**self.common, **contestant.settings, "epsilon": epsilon, "lr": lr, "seed": seed})
        except ArgumentError as error:
            if len(self.contestants) == 1:
                raise
            raise ArgumentError(f"contestant {contestant.name!r}: {error}") from error


def _said(value: Any) -> str:
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)):
        return "(" + ", ".join(_said(item) for item in value) + ")"
    return str(value)


# What a ledger's budget pays for: said before the first run, and asked before each.


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


# On disk at every moment: results.json lists the runs, and what a run spent is what its own folder states, which is all
# that it released, or more. Durations are apart, in timing.json.
COMPLETE, STOPPED, UNDER_WAY, NOTHING = "complete", "stopped", "under way", "ended before its first step"
TIMING_NOTE = (
    "Not covered by the guarantee: how long a run takes tells the sizes of its batches, which are secret under Poisson "
    "sampling. On private data, do not publish this file."
)


@dataclass(eq=False)
class Record:
    """One run that was begun, and what its folder says of it; `seconds` is how long it took."""

    run: Run
    path: Path
    seconds: float | None = None
    ended: bool = False
    statement: Statement | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)

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
    for name in GONE:
        held.pop(name, None)
    paid = held.pop("ledger", None)
    if paid is not None and ledger is None:
        raise DataError(
            f"ledger=None: the runs in {path} are paid for by the ledger {paid}; add --ledger {paid}, or name another "
            "folder"
        )
    asked = _settings(comparison)
    for name in {**held, **asked}:
        there, here = held.get(name), asked.get(name)
        # Contestants in another order are another comparison.
        if there != here or (isinstance(there, dict) and list(there) != list(here or ())):
            raise DataError(
                f"out={str(path)!r}: holds a comparison with other settings ({name}: {json.dumps(there)} there, "
                f"{json.dumps(here)} here); name another folder, or add --overwrite to begin anew"
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
        plans[run.contestant, run.epsilon, run.role] = built.private.plan
    return plans


@contextmanager
def _naming(run: Run) -> Iterator[None]:
    """Let a refusal name the contestant."""
    try:
        yield
    except DpcoreError as error:
        raise type(error)(f"contestant {run.contestant!r}: {error}") from error


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
    interruption: Interruption,
    plans: Plans,
    payer: Payer | None,
    tell: Callable[[Record], None],
) -> None:
    """Make all runs that are not complete, until a signal asks to stop; `tell` is called with each that ended.

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
        ledger = None if payer is None else payer.ledger.path
        return record, Task(log.comparison.settings_for(run), record.path, ledger, name)

    def end(record: Record, ended: Ended) -> None:
        seconds, budget = ended
        log.end(record, seconds)
        tell(record)
        if payer is not None:
            payer.end(described(record.run))
        if budget:
            raise BudgetError(f"the run {described(record.run)} was ended: {budget}")

    if jobs > 1:
        _side_by_side(log, jobs, interruption, begin, end)
        return
    while not interruption and (due := log.due()):
        record, task = begin(due[0])
        end(record, train_once(task, dataset, interruption))


def _side_by_side(
    log: Log,
    jobs: int,
    interruption: Interruption,
    begin: Callable[[Run], tuple[Record, Task]],
    end: Callable[[Record, Ended], None],
) -> None:
    active: dict[Any, tuple[Record, Worker]] = {}
    idle: list[Worker] = []
    unpaid: BudgetError | None = None
    failure: DpcoreError | None = None
    while True:
        if interruption.signal is not None or failure is not None:
            # They end after their step, with true statements; then the failure is raised.
            for _, worker in active.values():
                worker.stop()
        elif unpaid is None:
            under_way = {record.run for record, _ in active.values()}
            waiting = [run for run in log.due() if run not in under_way]
            for run in waiting[: jobs - len(active)]:
                try:
                    record, task = begin(run)
                except BudgetError as cause:  # those under way were paid for, and come to their end
                    unpaid = cause
                    break
                worker = idle.pop() if idle else Worker()
                worker.begin(task)
                active[worker.connection] = (record, worker)
        if not active:
            break
        for connection in wait(list(active), timeout=_SECONDS_BETWEEN_LOOKS):
            record, worker = active[connection]
            kind, content = worker.receive()
            del active[connection]
            if kind != "died":
                idle.append(worker)
            try:
                if kind == "done":
                    end(record, content)
                elif not interruption:
                    words = f"the run {described(record.run)} {'failed: ' if kind == 'failed' else ''}{content}"
                    raise DpcoreError(f"{words}; the same command goes on from the runs that are complete")
            except DpcoreError as cause:
                failure = failure or cause
    for worker in idle:
        worker.close()
    if failure or unpaid:
        raise failure or unpaid  # type: ignore[misc]


class Task(NamedTuple):
    """A run to make: its settings and folder, the ledger that pays for it, and what the ledger calls it."""

    settings: Settings
    path: Path
    ledger: Path | None
    name: str


Ended = tuple[float, str]
"""How many seconds the training of a run took, and why a ledger's budget ended it, if it did."""


def train_once(task: Task, dataset: Dataset, interruption: Interruption) -> Ended:
    """Make one run."""
    from dpcore.cli.train.training import Training

    settings = task.settings.resolved(len(dataset))
    training = Training(settings, dataset, task.ledger, task.name)
    training.private.begin()
    folder = RunFolder(task.path)
    folder.write_config(settings.to_dict(), task.ledger, training.statement(0).software)
    with locked(folder.path):
        outcome = training.run(interruption, folder, alone=False)
    return outcome.seconds, outcome.budget


class Worker:
    """A process of its own, single-threaded, that makes one run after the other: it imports torch once."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        with _starting():
            self._process.start()
        theirs.close()

    def begin(self, task: Task) -> None:
        """Let it make a run; one that has died meanwhile says so in `receive`."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(task)

    def stop(self) -> None:
        """Let it end its run after the step."""
        self._process.terminate()

    def receive(self) -> tuple[str, Any]:
        """Return how a run ended: ("done", Ended), ("failed" or "died", words)."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode or 0
            return "died", f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        return kind, content

    def close(self) -> None:
        """Let it end once it has nothing to do; this process does not wait for that."""
        self.connection.close()


def _work(connection: Connection) -> None:
    # Ctrl-C reaches the whole group of processes, and is held back in this one: the parent decides what it means. Once
    # the parent is gone, nobody would count the run as one of the comparison.
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    interruption, dataset = Interruption(), None
    signal.signal(signal.SIGTERM, lambda number, _: setattr(interruption, "signal", signal.Signals(number)))
    import torch

    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            task = connection.recv()
            try:
                if dataset is None:  # the same for all runs of a comparison
                    dataset = load(task.settings.data, task.settings.data_dir)
                connection.send(("done", train_once(task, dataset, interruption)))
            except (DpcoreError, OSError) as error:
                connection.send(("failed", str(error)))


@contextmanager
def _starting() -> Iterator[None]:
    """Let what is started in the block have one thread, and Ctrl-C held back for good; this process not."""
    former = {name: os.environ.get(name) for name in _ONE_THREAD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
