"""Checks of a ledger: that entries follow from each other, and that charges follow from events."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpcore.accounting import Composed, Event, smallest_epsilon
from dpcore.accounting.branches import Rows
from dpcore.accounting.events import check_event
from dpcore.errors import DpcoreError, PrivacyError
from dpcore.ledger.entries import START, Entry, number_in, seal, write
from dpcore.ledger.privacy_filter import PrivacyFilter, add
from dpcore.ledger.records import RunRecord, Verification
from dpcore.ledger.state import Run, State
from dpcore.ledger.storage import Storage
from dpcore.spec.canonical import read_json

if TYPE_CHECKING:
    import sqlite3

# Between machines and versions, figures may differ by rounding.
_TOLERANCE = 1e-9


# (steps, abandoned): what the first `steps` rows of a branch release, and the rows of the branches that were left.
EventAfter = Callable[[int, Sequence[Rows]], Event]


def event_of(event_after: EventAfter, steps: int, abandoned: Sequence[Rows] = ()) -> Event:
    """Return the event of so many steps and abandoned rows, checked to be one."""
    return check_event(**{f"event_after({steps}, {abandoned})": event_after(steps, abandoned)})


def follow(state: State, previous: str, entry: Entry) -> str:
    """Take an entry into account; return what is wrong with it, or an empty string."""
    if entry.seal != seal(previous, entry.body):
        return f"entry {entry.number} is not what was written: its seal does not fit"
    try:
        state.apply(read_json(entry.body))
    except ValueError as cause:
        return f"entry {entry.number} {cause}"
    return ""


def check_plan(run: Run, event_after: EventAfter) -> None:
    """Refuse a plan that is not the one whose events the ledger holds: rows that have left would be recounted by it."""
    if not _same(event_of(event_after, run.planned_steps).to_dict(), run.planned):
        raise PrivacyError(
            f"run {run.run_id}: began under another plan (noise, sampling or number of steps), and its rows cannot be "
            "recounted under this one; begin a new run"
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=_TOLERANCE)
    return bool(a == b)


def record(run: Run) -> RunRecord:
    """Return what the ledger says about a run."""
    alike = ("run_id", "name", "begun", "adjacency", "steps", "releases", "charge", "description", "dataset")
    return RunRecord(
        **{name: getattr(run, name) for name in alike},
        forks=len(run.branches) - 1,
        event=Event.from_dict(run.event),
        planned=run.plan,
        marks={name: branch.mark for name, branch in run.branches.items()},
    )


def beside(state: State) -> bool:
    """Whether rows were reserved beside the plans that were fixed beforehand."""
    runs = [run for run in state.runs.values() if run.releases]
    return not all(state.in_plan(run, run.mark, run.releases, Event.from_dict(run.event)) for run in runs)


def different_data(prints: int) -> str:
    """Say that runs saw data with so many fingerprints."""
    return f"The runs saw data with {prints} different fingerprints; all of them are charged to the same people."


def notes(runs: Sequence[RunRecord], spent: float, exceeded: bool) -> tuple[str, ...]:
    """Return what a reader of the total should know."""
    found = []
    prints = {run.dataset for run in runs if run.dataset}
    if len(prints) > 1:
        found.append(different_data(len(prints)))
    if len({run.adjacency for run in runs} - {None}) > 1:
        found.append("Add-remove and zero-out runs are mixed: the total holds under zero-out.")
    if exceeded:
        found.append("The budget is exceeded: an older copy of the ledger was put back, or rows left without it.")
    if math.isinf(spent):
        found.append("At least one release has no guarantee at all.")
    return tuple(found)


def verify(storage: Storage, connection: sqlite3.Connection, wanted: str | None) -> Verification:
    """Check everything; see `dpcore.ledger.Ledger.verify`."""
    import sqlite3

    problems = [
        f"SQLite finds: {text}" for (text,) in connection.execute("PRAGMA integrity_check").fetchall() if text != "ok"
    ]
    state, last = State(), START
    seen: set[str] = set()
    recomputed: dict[str, float] = {}
    try:
        for entry in storage.entries(connection, 0):
            problem = follow(state, last, entry)
            if problem:
                problems.append(f"{problem}; nothing after it was checked")
                break
            last = entry.seal
            seen.add(last)
            problems += _check_charge(state, entry, recomputed)
    except sqlite3.DatabaseError as cause:
        problems.append(f"entries after number {state.entries - 1} cannot be read ({cause})")
    if state.entries:
        problems += _check_budget(state)
    if wanted is not None and wanted not in seen:
        problems.append(f"no entry bears the seal {wanted}: the end was cut off, or this is another ledger")
    return Verification(tuple(problems), state.entries, last)


def _check_charge(state: State, entry: Entry, recomputed: dict[str, float]) -> list[str]:
    content = read_json(entry.body)
    if "charge" not in content:
        return []
    body = write(content["event"])
    try:
        if body not in recomputed:
            event = Event.from_dict(content["event"])
            recomputed[body] = _filter(state).charge(event)
        stored = number_in(content["charge"])
    except (DpcoreError, ValueError) as cause:
        return [f"entry {entry.number} holds an event that cannot be charged: {cause}"]
    if math.isclose(stored, recomputed[body], rel_tol=_TOLERANCE):
        return []
    return [f"entry {entry.number} states the charge {stored!r}, and its event costs {recomputed[body]!r}"]


def _check_budget(state: State) -> list[str]:
    budget, fixed = state.header["budget"], state.fixed
    if budget is None or fixed is None:
        return []
    problems = []
    allowed = _filter(state).limit(*budget)
    if state.limit is None or not math.isclose(state.limit, allowed, rel_tol=_TOLERANCE):
        problems.append(f"the limit {state.limit!r} is not what the budget allows, {allowed!r}")
    plans = Composed(tuple(state.runs[run_id].plan for run_id in fixed.runs))
    if not _same(plans.to_dict(), fixed.event):
        problems.append("the event of the runs fixed beforehand is not that of their plans")
    if fixed.runs:
        epsilon = smallest_epsilon(plans, budget[1])[0]
        if epsilon > budget[0] * (1.0 + _TOLERANCE):
            problems.append(f"the runs fixed beforehand cost epsilon={epsilon!r}, more than the budget's {budget[0]!r}")
    spent = add(run.charge for run in state.runs.values())
    if fixed.alone and beside(state):
        problems.append("the budget is exceeded: rows were reserved beside the plans that keep all of it")
    if not fixed.alone and spent > allowed * (1.0 + _TOLERANCE):
        problems.append(f"the budget is exceeded: {spent!r} is charged of {allowed!r}")
    return problems


def _filter(state: State) -> PrivacyFilter:
    order = state.order
    if order is None:  # nothing was reserved, and nothing costs nothing at any order
        return PrivacyFilter(state.header["composition"])
    return PrivacyFilter(state.header["composition"], order)
