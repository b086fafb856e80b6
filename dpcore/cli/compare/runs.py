"""Making the runs of a comparison, one after the other or several at a time, with a bar for each."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dpcore.accounting import Event
from dpcore.cli.compare.comparison import Comparison, Run
from dpcore.cli.compare.log import COMPLETE, Log
from dpcore.cli.compare.worker import Process, shared_stop, train_once
from dpcore.cli.datasets import Dataset
from dpcore.cli.train.interrupt import Interruption
from dpcore.errors import BudgetError, DpcoreError
from dpcore.statement.text import format_number

_SECONDS_BETWEEN_LOOKS = 0.25


@dataclass(frozen=True)
class Plan:
    """What a run of a contestant releases: the event at its end, and gradients per example and step."""

    event: Event
    gradients: float


Plans = Mapping[tuple[str, float, str], Plan]
"""Plans by contestant, epsilon and role."""


def preview(comparison: Comparison, dataset: Dataset) -> dict[tuple[str, float, str], Plan]:
    """Build one run of every plan, so that nothing is refused after hours of training.

    Raises
    ------
    ArgumentError, BackendError, PrivacyError
        Where a contestant's settings do not fit each other, the data or this machine.
    """
    from dpcore.cli.train.training import Training

    plans = {}
    for run in comparison.examples:
        try:
            plan = Training(comparison.settings_for(run), dataset).plan
        except DpcoreError as error:
            raise type(error)(f"contestant {run.contestant!r}: {error}") from error
        gradients = sum(len(plan.method.query.points(step)) for step in range(plan.steps)) / plan.steps
        plans[run.contestant, run.epsilon, run.role] = Plan(plan.event_after(plan.steps), gradients)
    return plans


class Display:
    """A bar for all runs and one for each that is under way; on no terminal, a line for each that ended.

    Parameters
    ----------
    console : Console
    complete, total : int
        Runs.
    """

    def __init__(self, console: Console, complete: int, total: int) -> None:
        self._console, self._complete, self._total = console, complete, total
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._all = self._progress.add_task(self._words, total=total, completed=complete)
        self._tasks: dict[Run, TaskID] = {}

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @property
    def _words(self) -> str:
        return f"{self._complete} of {self._total} runs"

    def begin(self, run: Run) -> None:
        """Add the bar of a run."""
        self._tasks[run] = self._progress.add_task(f"  {described(run)}", total=None)

    def steps(self, run: Run, taken: int, planned: int) -> None:
        """Move the bar of a run."""
        self._progress.update(self._tasks[run], completed=taken, total=planned)

    def end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Remove the bar of a run and say what it came to."""
        self._progress.remove_task(self._tasks.pop(run))
        if result["status"] != COMPLETE:
            return
        self._complete += 1
        self._progress.update(self._all, completed=self._complete, description=self._words)
        accuracy = f"held-out accuracy {100 * result['test_accuracy'][-1]:.2f}%"
        self._console.print(f"{self._words}: {described(run)}: {accuracy}, {result['seconds']:.1f} s")


def described(run: Run) -> str:
    """Return a run in words."""
    return (
        f"{run.contestant}, epsilon {format_number(run.epsilon)}, {run.role}, lr {format_number(run.lr)}, "
        f"seed {run.seed}"
    )


def make_runs(
    comparison: Comparison,
    log: Log,
    dataset: Dataset,
    plans: Plans,
    jobs: int,
    display: Display,
    interruption: Interruption,
    ledger: Path | None = None,
) -> None:
    """Make all runs that are not complete, until a signal asks to stop.

    Raises
    ------
    DpcoreError
        Where a run fails, or a ledger's budget ends; what was complete before stays in the log.
    """
    if jobs > 1:
        _side_by_side(comparison, log, plans, jobs, display, interruption, ledger)
        return
    while not interruption and (due := comparison.due(accuracies(log))):
        run = due[0]
        number = log.begin(run, plans[run.contestant, run.epsilon, run.role].event)
        display.begin(run)
        settings = comparison.settings_for(run)
        tell = partial(display.steps, run)
        result = train_once(settings, dataset, interruption, tell, ledger, described(run))
        log.end(number, result)
        display.end(run, result)
        if "budget" in result:
            raise BudgetError(f"the run {described(run)} was ended: {result['budget']}")


def accuracies(log: Log) -> dict[Run, float]:
    """Return held-out accuracy at the end of each complete run."""
    return {run: record["test_accuracy"][-1] for run, record in log.complete().items()}


def _side_by_side(
    comparison: Comparison,
    log: Log,
    plans: Plans,
    jobs: int,
    display: Display,
    interruption: Interruption,
    ledger: Path | None,
) -> None:
    stop = shared_stop()
    active: dict[Connection, tuple[Run, int, Process]] = {}
    failure, ended = "", False
    while True:
        if interruption.signal is not None:
            stop.value = int(interruption.signal)
        if not stop.value:
            under_way = {run for run, _, _ in active.values()}
            waiting = [run for run in comparison.due(accuracies(log)) if run not in under_way]
            for run in waiting[: jobs - len(active)]:
                number = log.begin(run, plans[run.contestant, run.epsilon, run.role].event)
                display.begin(run)
                process = Process(comparison.settings_for(run), stop, ledger, described(run))
                active[process.connection] = (run, number, process)
        if not active:
            break
        for connection in wait(list(active), timeout=_SECONDS_BETWEEN_LOOKS):
            run, number, process = active[connection]  # type: ignore[index]
            kind, content = process.receive()
            if kind == "steps":
                display.steps(run, *content)
                continue
            del active[connection]  # type: ignore[arg-type]
            if kind == "done":
                log.end(number, content)
                display.end(run, content)
                if "budget" in content:
                    failure = failure or f"the run {described(run)} was ended: {content['budget']}"
                    ended = True
                    stop.value = int(signal.SIGTERM)
            elif not interruption:
                # The others end after their step, with true statements; then the failure is told.
                failure = failure or f"the run {described(run)} {'failed: ' if kind == 'failed' else ''}{content}"
                stop.value = int(signal.SIGTERM)
    if failure and ended:
        raise BudgetError(failure)
    if failure:
        raise DpcoreError(f"{failure}; the same command goes on from the runs that are complete")
