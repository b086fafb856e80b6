"""The runs of a comparison, each into a folder of its own: one after the other here, or several at a time elsewhere."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from multiprocessing.synchronize import Event as Flag
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from dpcore.cli.train.settings import Settings, settings_from
from dpcore.cli.train.train import GONE
from dpcore.errors import ArgumentError, BudgetError, DataError, DpcoreError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.plan.plan import Plan
from dpcore.spec.canonical import plain, read_json_file
from dpcore.spec.validate import choice, integer
from dpcore.statement.statement import Statement
from dpcore.statement.text import WRITTEN_BEFORE, format_number

if TYPE_CHECKING:
    from dpcore.cli.train.training import Training

SEARCH, FINAL = "search", "final"
EPOCHS, GRADIENTS = "epochs", "gradients"
# Seeds of the search for learning rates start here, so that no final run shares one with a search run.
FIRST_SEARCH_SEED = 1000
# The same for all contestants, or decided by the comparison itself.
SAME_FOR_ALL = frozenset((
    "data", "data_dir", "model", "model_dir", "model_scale", "weights", "image_size", "max_length", "epsilon", "delta",
    "noise_multiplier", "seed", "backend",
))  # fmt: skip
# A list of these is several contestants: default rates and gradients follow from them.
ONE_EACH = frozenset(("method", "base"))


class Run(NamedTuple):
    """One run of a comparison."""

    contestant: str
    epsilon: float
    role: str
    lr: float
    seed: int
    setting: int = 0
    """Index into `Comparison.candidates`."""


@dataclass(frozen=True)
class Contestant:
    """A method with settings of its own, none of `SAME_FOR_ALL`, and the learning rates it may try.

    One rate needs no search, none takes the default of the update rule. `grids` have several values.
    """

    name: str
    settings: dict[str, Any]
    lr: tuple[float, ...] = ()
    grids: dict[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """A whole comparison: contestants of different names, each with `seeds` final runs at every epsilon.

    `search_seeds` are runs of each learning rate and setting of a grid. `common` are settings of all contestants; a
    contestant's own win. If `equal` is `GRADIENTS`, `epochs` are gradients per example: a method that takes w in a step
    has 1/w of the epochs, rounded down. Differences are to `baseline`, if one is named.
    """

    contestants: tuple[Contestant, ...]
    epsilon: tuple[float, ...]
    common: dict[str, Any] = field(default_factory=dict)
    seeds: int = 3
    search_seeds: int = 1
    equal: str = EPOCHS
    baseline: str | None = None

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
        integer(1, search_seeds=self.search_seeds)
        choice((EPOCHS, GRADIENTS), equal=self.equal)
        if self.baseline is not None and self.baseline not in self._named:
            raise ArgumentError(f"baseline={self.baseline!r}: must be a contestant: {', '.join(self._named)}")
        for contestant in self.contestants:
            if self.equal == GRADIENTS and "epochs" in {**contestant.settings, **contestant.grids}:
                raise ArgumentError(
                    f"contestant {contestant.name!r}: 'epochs' follows from equal='gradients'; set it for all"
                )
            for name, values in contestant.grids.items():
                if any(value in values[:place] for place, value in enumerate(values)):
                    raise ArgumentError(f"{name} of {contestant.name}={values!r}: has a value twice")
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

    def candidates(self, contestant: str) -> list[dict[str, Any]]:
        """Return the combinations of values of the contestant's grids; one, empty, if it has none."""
        grids = self._named[contestant].grids
        return [dict(zip(grids, values, strict=True)) for values in product(*grids.values())]

    def settings_for(self, run: Run) -> Settings:
        """Return the settings of `dpcore train` for this run."""
        return self._settings(self._named[run.contestant], run.epsilon, run.lr, run.seed, run.setting)

    def search(self, contestant: str, epsilon: float) -> list[Run]:
        """Return the runs that decide settings and learning rate; none if there is nothing to choose."""
        tried = self._tried(contestant)
        if len(tried) == 1:
            return []
        seeds = range(FIRST_SEARCH_SEED, FIRST_SEARCH_SEED + self.search_seeds)
        return [Run(contestant, epsilon, SEARCH, lr, seed, setting) for setting, lr in tried for seed in seeds]

    @cached_property
    def searches(self) -> bool:
        """Whether anything is chosen: then one half of the test set chooses, and the other measures."""
        return any(len(self._tried(name)) > 1 for name in self._named)

    def _tried(self, contestant: str) -> list[tuple[int, float]]:
        return [(at, lr) for at in range(len(self.candidates(contestant))) for lr in self.grid(contestant)]

    def final(self, contestant: str, epsilon: float, lr: float, setting: int = 0) -> list[Run]:
        """Return the runs that are compared."""
        return [Run(contestant, epsilon, FINAL, lr, seed, setting) for seed in range(self.seeds)]

    def chosen(self, contestant: str, epsilon: float, accuracy: Mapping[Run, float]) -> tuple[int, float] | None:
        """Return setting and learning rate with the best mean accuracy, or None while the search is not complete.

        Of equally good ones it is the setting that was named first, then the smallest rate.
        """
        tried, search = self._tried(contestant), self.search(contestant, epsilon)
        if not search:
            return tried[0]
        if any(run not in accuracy for run in search):
            return None
        means = {one: float(np.mean([accuracy[r] for r in search if (r.setting, r.lr) == one])) for one in tried}
        return max(tried, key=means.__getitem__)

    def due(self, accuracy: Mapping[Run, float]) -> list[Run]:
        """Return the runs that may begin now; those with an accuracy are complete."""
        ahead = self.ahead(accuracy)
        return [r for r in ahead if r.role == SEARCH or self.chosen(r.contestant, r.epsilon, accuracy) is not None]

    def ahead(self, accuracy: Mapping[Run, float]) -> list[Run]:
        """Return all runs to come, in the order in which they are made one after the other.

        Runs whose settings are not chosen yet have the first ones, and the smallest rate.
        """
        wanted: list[Run] = []
        for epsilon in self.epsilon:
            for contestant in self._named:
                setting, lr = self.chosen(contestant, epsilon, accuracy) or self._tried(contestant)[0]
                wanted += self.search(contestant, epsilon)
                wanted += self.final(contestant, epsilon, lr, setting)
        return [run for run in wanted if run not in accuracy]

    @property
    def total(self) -> int:
        """The number of runs."""
        return len(self.epsilon) * sum(len(self.search(name, self.epsilon[0])) + self.seeds for name in self._named)

    @property
    def examples(self) -> list[Run]:
        """One run of each plan that occurs: learning rate, role and seed do not matter."""
        return [
            Run(name, epsilon, FINAL, self.grid(name)[0], 0, setting)
            for epsilon in self.epsilon
            for name in self._named
            for setting in range(len(self.candidates(name)))
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values, in the form of a configuration file."""
        own = {key: value for key, value in asdict(self).items() if key not in ("contestants", "common")}
        tables = {
            item.name: {**item.settings, **item.grids, "lr": list(self.grid(item.name))} for item in self.contestants
        }
        return {"backend": self.shared.backend, **self.common, **own, "contestants": tables}

    def _settings(
        self, contestant: Contestant, epsilon: float, lr: float | None, seed: int, setting: int = 0
    ) -> Settings:
        own = {**contestant.settings, **self.candidates(contestant.name)[setting]}
        try:
            made = settings_from({**self.common, **own, "epsilon": epsilon, "lr": lr, "seed": seed})
            if self.equal == GRADIENTS:
                taken = gradients_of(made)
                if made.epochs < taken:
                    raise ArgumentError(
                        f"epochs={made.epochs}: must be at least {taken} with equal='gradients', the gradients that "
                        f"{made.method} takes of an example in a step"
                    )
                made = replace(made, epochs=made.epochs // taken)
            return made
        except ArgumentError as error:
            if len(self.contestants) == 1:
                raise
            raise ArgumentError(f"contestant {contestant.name!r}: {error}") from error


def gradients_of(settings: Settings) -> int:
    """Return the most gradients of an example that a step takes; a query has all its points after `lags` steps."""
    query = settings.build_method().query
    return max(len(query.points(step)) for step in range(query.lags + 2))


# The runs that a ledger's budget pays for: reported before the first run, and checked before each.


def ledger_for(path: Path, events: Sequence[Event]) -> Ledger:
    """Open the ledger; PrivacyError if it would refuse one of these plans' events after paying for others."""
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


def pays_for(ledger: Ledger | None, events: Sequence[Event]) -> bool:
    """Whether the budget pays for one run to its end, or for several one after the other.

    Runs after the first row must fit the filter, whose order the first run may still change: for several runs this is
    the budget's present promise. Other commands may use the ledger meanwhile; a run for which they leave too little
    ends early.
    """
    if ledger is None or ledger.budget is None or not events:
        return True
    left = ledger.remaining()
    return left.fits(events[0]) if len(events) == 1 else left.filter.charge(Composed(tuple(events))) <= left.left


# On disk at every moment: results.json lists the runs, and a run's own folder states what it spent, or more. Durations
# are not kept: the duration of a run reveals the sizes of its batches.
FORMAT = 3
"""Of results.json; in 2 the search was measured on the whole test set."""
COMPLETE, STOPPED, UNDER_WAY, NOTHING = "complete", "stopped", "under way", "ended before its first step"


@dataclass(eq=False)
class Record:
    """One run that was begun, and the content of its folder."""

    run: Run
    path: Path
    ended: bool = False
    statement: Statement | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> None:
        """Read the folder of a run that has ended, in good order or not."""
        self.statement, self.evaluations = read_run(self.path)
        self.ended = True
        if self.status == COMPLETE and not self.evaluations:
            raise DataError(
                f"run folder {self.path}: its metrics.jsonl is empty, though the run is complete; put it back"
            )

    @property
    def status(self) -> str:
        """`COMPLETE`, `STOPPED` early or killed, `UNDER_WAY`, or `NOTHING` if no step was taken."""
        stated = self.statement
        if stated is None:
            return NOTHING if self.ended else UNDER_WAY
        # While a run is under way its statement has a note.
        return COMPLETE if stated.steps_taken == stated.steps_planned and not stated.note else STOPPED

    @property
    def goes_on_after(self) -> int | None:
        """The last step of a run that was stopped after it, with a checkpoint; a killed run may have released more."""
        stated = self.statement
        if stated is None or self.status != STOPPED or stated.note.startswith(WRITTEN_BEFORE):
            return None
        return stated.steps_taken if checkpoint_of(self.path).exists() else None

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
        folder.write_config(plain(comparison.to_dict()), ledger)
        log = cls(folder, comparison, [])
        log.write()
        return log

    def begin(self, run: Run) -> Record:
        """Record that a run begins, and its folder."""
        name = re.sub("[^a-z0-9]+", "-", run.contestant.lower()).strip("-")
        number, parent = len(self.records) + 1, self.folder.path / RUNS
        while (path := parent / f"{number:03d}-{name}").exists() or checkpoint_of(path).exists():
            number += 1
        self.records.append(Record(run, path))
        self.write()
        return self.records[-1]

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
        """Put results.json in place."""
        base = self.folder.path
        runs = [
            {**record.run._asdict(), "folder": str(record.path.relative_to(base)), "status": record.status}
            for record in self.records
        ]
        self.folder.write_json("results.json", {"format": FORMAT, "summary": self.summary, "runs": runs})


def earlier(path: Path, comparison: Comparison, ledger: Path | None, *, overwrite: bool) -> list[Record] | None:
    """Return the runs of the comparison with the same settings in a folder; None if a new one may begin.

    DataError if neither is possible; nothing is made and nothing is deleted.
    """
    if (path / "config.json").is_file():
        with locked(path):
            pass
    if overwrite or not holds(path, COMPARISON):
        check_folder(path, overwrite=overwrite, kind=COMPARISON)
        return None
    saved, records = _saved(path)
    for name in GONE:
        saved.pop(name, None)
    saved = {"equal": EPOCHS, **saved, "baseline": comparison.baseline}  # which decides no run
    paid = saved.pop("ledger", None)
    if paid is not None and ledger is None:
        raise DataError(
            f"ledger=None: the runs in {path} are paid for by the ledger {paid}; add --ledger {paid}, or name another "
            "folder"
        )
    present = plain(comparison.to_dict())
    for name in {**saved, **present}:
        there, here = saved.get(name), present.get(name)
        # Contestants in another order are another comparison.
        if there != here or (isinstance(there, dict) and list(there) != list(here or ())):
            raise DataError(
                f"out={str(path)!r}: has a comparison with other settings ({name}: {json.dumps(there)} there, "
                f"{json.dumps(here)} here); name another folder, or add --overwrite to start again"
            )
    return records


def _saved(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Return the settings and the runs of the comparison in a folder."""
    try:
        settings = read_json_file(path / "config.json")["settings"]
        if not (path / "results.json").exists():
            return settings, []
        records, stored = [], read_json_file(path / "results.json")
        for item in stored["runs"]:
            if item["role"] == SEARCH and stored["format"] < FORMAT:
                raise DataError(
                    f"out={str(path)!r}: an earlier version chose its settings on the images that measure them; name "
                    "another folder, or add --overwrite to start again"
                )
            of_run = {"setting": 0, **item}
            records.append(Record(Run(*(of_run[name] for name in Run._fields)), path / item["folder"]))
            records[-1].read()
            if item["status"] in (COMPLETE, STOPPED) and records[-1].statement is None:
                raise DataError(
                    f"out={str(path)!r}: the statement of its run {item['folder']} is gone, so its cost is unknown; "
                    "put the folder back, or add --overwrite to start again"
                )
    except (ValueError, KeyError, TypeError) as cause:
        raise DataError(
            f"out={str(path)!r}: its files cannot be read ({cause}); add --overwrite to start again"
        ) from cause
    return settings, records


_SECONDS_BETWEEN_LOOKS = 0.25
# With several processes side by side, threads inside of each only take turns.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


Plans = Mapping[tuple[str, float, int], Plan]
"""The plan of each contestant's runs at an epsilon, with a setting."""


def events_of(plans: Plans, runs: Iterable[Run]) -> list[Event]:
    """Return the event of each run."""
    return [plans[run.contestant, run.epsilon, run.setting].event for run in runs]


def check_plans(comparison: Comparison, dataset: Dataset, ledger: Path | None) -> None:
    """Refuse runs that are known to fail, without torch."""
    if ledger is not None:
        Ledger.open(ledger)
    if comparison.searches:
        dataset.tested_on(0)
    for run in comparison.examples:
        with _naming(run):
            comparison.settings_for(run).plan(len(dataset))


def preview(comparison: Comparison, dataset: Dataset, ledger: Path | None) -> tuple[Plans, dict[Run, Training]]:
    """Build one run of every plan, so that nothing is refused after hours of training; return those of small models.

    The first run's remarks on the data and on the ledger apply to all.
    """
    from dpcore.cli.train.training import Training

    plans: dict[tuple[str, float, int], Plan] = {}
    kept: dict[Run, Training] = {}
    room = 0 if comparison.searches or ledger is not None else _KEPT
    for run in comparison.examples:
        with _naming(run):
            built = Training(comparison.settings_for(run), dataset, None if plans else ledger)
        for sentence in () if plans else built.remarks:
            remark(sentence)
        plans[run.contestant, run.epsilon, run.setting] = built.private.plan
        if (room := room - sum(p.numel() for p in built.model.parameters())) >= 0:
            kept[run] = built
    return plans, kept


_KEPT = 1 << 22
"""So many parameters of runs that were built to see that they can be."""


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
        f"seed {run.seed}{f', setting {run.setting + 1}' if run.setting else ''}"
    )


def make_runs(
    log: Log,
    dataset: Dataset,
    jobs: int,
    interruption: Interruption,
    plans: Plans,
    paying: Ledger | None,
    tell: Callable[[Record], None],
    share: Callable[[float], None] = lambda _: None,
    built: dict[Run, Training] | None = None,
) -> None:
    """Make all runs that are not complete, until a signal stops it; `tell` is called with each that ended.

    If one after the other is made, `share` is called with the part of a run that is done, and those in `built` are
    taken out of it.
    If a run fails, or a ledger's budget does not pay for the next, earlier complete runs stay in the log.
    """

    def begin(run: Run) -> tuple[Record, Task]:
        name = described(run)
        record = next((one for one in log.records if one.run == run and one.goes_on_after is not None), None)
        # Part of a run is spent for nothing.
        if record is None and not pays_for(paying, events_of(plans, [run])):
            raise BudgetError(
                f"the ledger's budget does not pay for the whole of the next run, {name}; it was not begun"
            )
        record, comparison = record or log.begin(run), log.comparison
        # What chooses does not measure what was chosen.
        half = None if not comparison.searches else 0 if run.role == SEARCH else 1
        ledger = None if paying is None else paying.path
        return record, Task(comparison.settings_for(run), record.path, ledger, name, half, record.goes_on_after)

    def end(record: Record, budget: str) -> None:
        record.read()
        log.write()
        tell(record)
        if budget:
            raise BudgetError(f"the run {described(record.run)} was ended: {budget}")

    if jobs > 1:
        _side_by_side(log, jobs, interruption, begin, end)
        return
    while not interruption and (due := log.due()):
        record, task = begin(due[0])
        end(record, train_once(task, dataset, interruption, share, (built or {}).pop(due[0], None)))


def _side_by_side(
    log: Log,
    jobs: int,
    interruption: Interruption,
    begin: Callable[[Run], tuple[Record, Task]],
    end: Callable[[Record, str], None],
) -> None:
    active: dict[Future[str], Record] = {}
    failure: DpcoreError | None = None
    stop = multiprocessing.get_context("spawn").Event()
    with workers(jobs, stop) as pool:
        try:
            while True:
                if interruption or failure is not None:
                    # Runs end after their step, with true statements; then the failure is raised.
                    stop.set()
                else:
                    under_way = {record.run for record in active.values()}
                    for run in [run for run in log.due() if run not in under_way][: jobs - len(active)]:
                        record, task = begin(run)
                        active[_submitted(pool, task)] = record
                if not active:
                    break
                for future in wait(active, _SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED).done:
                    record = active.pop(future)
                    try:
                        end(record, _result(record, future))
                    except DpcoreError as cause:
                        failure = failure or (None if interruption else cause)
        finally:
            stop.set()
    if failure is not None:
        raise failure


def _submitted(pool: ProcessPoolExecutor, task: Task) -> Future[str]:
    try:
        with _starting():
            return pool.submit(make_run, task)
    except BrokenProcessPool as cause:  # a process ended since the last look
        future = Future[str]()
        future.set_exception(cause)
        return future


def _result(record: Record, future: Future[str]) -> str:
    try:
        return future.result()
    except (DpcoreError, OSError, BrokenProcessPool) as cause:
        said = "its process was ended" if isinstance(cause, BrokenProcessPool) else str(cause)
        raise DpcoreError(
            f"the run {described(record.run)} failed: {said}; the same command continues after the complete runs"
        ) from cause


class Task(NamedTuple):
    """A run to make: its settings and folder, the ledger that pays for it, and what the ledger calls it."""

    settings: Settings
    path: Path
    ledger: Path | None
    name: str
    half: int | None = None
    """Half of the test set, which measures the run; None is all of it."""
    after: int | None = None
    """The step after which it goes on; None if it begins."""


def train_once(
    task: Task,
    dataset: Dataset,
    interruption: Interruption,
    share: Callable[[float], None] = lambda _: None,
    built: Training | None = None,
) -> str:
    """Make one run, which may be built already; return why a ledger's budget ended it, if it did."""
    from dpcore.cli.train.training import Training, read_checkpoint

    if task.half is not None:
        dataset = dataset.tested_on(task.half)
    settings, kept = task.settings.resolved(len(dataset)), checkpoint_of(task.path)
    training = built or Training(settings, dataset, task.ledger, task.name)
    if task.after is not None:
        training.load_state_dict(read_checkpoint(kept))
        # What was released since a checkpoint was written would be released again, and not counted.
        if (taken := training.private.steps_taken) != task.after:
            raise DataError(
                f"checkpoint {kept}: is of step {taken}, and the statement of its run is not; delete it, and the same "
                "command begins the run again"
            )
        # The curves of a comparison have the ends of epochs, and not the step at which a signal came.
        per_epoch = training.steps_per_epoch
        training.evaluations = [one for one in training.evaluations if one["step"] % per_epoch == 0]
    training.private.begin()
    folder = RunFolder(task.path, existing=task.after is not None)
    if task.after is None:
        folder.write_config(settings.to_dict(), task.ledger, training.statement(0).software)
    planned = training.private.plan.steps
    with locked(folder.path):
        kept.unlink(missing_ok=True)
        # Of a run that goes on: its digests are those of a model and a statement that do not stay.
        (task.path / "README.md").unlink(missing_ok=True)
        outcome = training.run(interruption, folder, lambda taken, _: share(taken / planned), alone=False)
        if not outcome.complete:
            training.save(kept)
        return outcome.budget


class _Shared(Interruption):
    """Stops a worker's run once the event is set, which all processes share."""

    def __init__(self, stop: Flag) -> None:
        super().__init__()
        self._stop = stop

    def __bool__(self) -> bool:
        if self._stop.is_set():
            self.signal = signal.SIGTERM
        return super().__bool__()


def workers(jobs: int, stop: Flag) -> ProcessPoolExecutor:
    """Return processes of one thread each, which make runs by `make_run` and import torch once."""
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _prepare, (stop,))


_worker: dict[str, Any] = {}  # what a worker was given at its start
_loaded = lru_cache(maxsize=1)(load)  # the same data for all runs of a comparison


def _prepare(stop: Flag) -> None:
    # Once the parent is gone, nobody would count a run as one of the comparison.
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    _worker["interruption"] = _Shared(stop)
    import torch

    torch.set_num_threads(1)


def make_run(task: Task) -> str:
    """Make one run in a worker; return as `train_once` does."""
    dataset = _loaded(*task.settings.source)
    return train_once(task, dataset, _worker["interruption"])


@contextmanager
def _starting() -> Iterator[None]:
    """Start processes in the block with one thread each, and Ctrl-C blocked for good; this process is as before.

    Ctrl-C reaches the whole group of processes: the parent decides what it means.
    """
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
