"""Checks of a ledger: that entries follow from each other, and that charges follow from events."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dpcore.accounting import Composed, Event, Gaussian, smallest_epsilon
from dpcore.accounting.branches import Rows
from dpcore.accounting.events import check_event
from dpcore.accounting.gaussian import analytic_noise_multiplier
from dpcore.errors import BudgetError, DpcoreError, PrivacyError
from dpcore.ledger.privacy_filter import DEFAULT_ORDER, PrivacyFilter, add
from dpcore.ledger.state import START, Entry, Run, State, affords, number_in, number_out, seal, write
from dpcore.ledger.storage import Storage
from dpcore.spec import validate
from dpcore.spec.canonical import read_json

if TYPE_CHECKING:
    import sqlite3

# The answers of a ledger: immutable, and plain enough for JSON.


@dataclass(frozen=True)
class RunRecord:
    """A run in the ledger."""

    run_id: str
    name: str
    begun: str
    """UTC time in ISO format."""
    adjacency: str | None
    """None if nothing is guaranteed."""
    steps: int
    """Rows planned."""
    releases: int
    """Rows reserved and not given back, over all branches."""
    forks: int
    event: Event
    """The event of those rows, an upper bound."""
    planned: Event
    """The event of the whole planned run."""
    charge: float
    """The charge of `event` to the ledger's filter."""
    description: Any
    """The settings, as the run gave them."""
    dataset: str
    """Fingerprint of the data."""
    marks: dict[str, int]
    """Of each branch: rows below it may have left."""

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of this run at `delta`, without other runs."""
        return smallest_epsilon(self.event, delta)[0]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        events = {"event": self.event.to_dict(), "planned": self.planned.to_dict()}
        return {**vars(self), **events, "charge": number_out(self.charge)}


@dataclass(frozen=True)
class Total:
    """The total cost of a ledger's runs."""

    delta: float
    adjacency: str | None
    """Zero-out if add-remove and zero-out runs are mixed; None if there is no run, or no guarantee."""
    runs: int
    fixed: float
    """Epsilon as if all runs had been fixed beforehand: the smallest of the accountants. It does **not** cover settings
    that were chosen after looking at earlier results."""
    accountant: str
    """The accountant of `fixed`; empty if nothing was released."""
    budget: float | None
    """Epsilon including all later releases, however they are chosen: the budget's at `delta`, or that of `plan` if
    nothing else can follow. The ledger stops before it is crossed. None without a budget."""
    odometer: float
    """Epsilon of all releases so far, whenever one looks and however runs were chosen. Looking at any time has a price:
    the odometer may be near or above the budget's epsilon while `spent` is well below `limit`."""
    spent: float
    """The filter's sum."""
    limit: float | None
    """The limit of the filter's sum; None without a budget."""
    plan: float | None = None
    """Epsilon of the whole plans of the runs that were fixed before the first release; None if there are none, or no
    budget."""
    fixed_runs: tuple[str, ...] = ()
    """Their ids."""
    alone: bool = False
    """Whether those plans keep the whole budget, so that it pays for no later run (`dpcore.ledger.state`)."""
    kept: float = 0.0
    """Part of the limit that is kept free for the rest of those plans while living processes may come to it."""
    notes: tuple[str, ...] = ()

    @property
    def filter(self) -> float:
        """Epsilon to state however the runs were chosen: the budget's, or the odometer's if there is no budget.

        0 if nothing was released.
        """
        if self.spent == 0.0:
            return 0.0
        return self.odometer if self.budget is None else self.budget

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; infinities are "inf"."""
        values = asdict(self) | {"filter": self.filter, "fixed_runs": list(self.fixed_runs), "notes": list(self.notes)}
        return {key: number_out(item) if isinstance(item, float) else item for key, item in values.items()}


@dataclass(frozen=True)
class Remaining:
    """The rest of a budget."""

    filter: PrivacyFilter
    spent: float
    """The filter's sum so far, including the part kept free for runs fixed beforehand."""
    limit: float
    """The limit of the sum."""
    budget: tuple[float, float]
    """Its epsilon and delta."""
    plans: Event | None = None
    """The plans of runs that were begun, while nothing is reserved: a further run is then fixed beforehand, too, and
    the rest is counted by the tightest accountant. None afterwards: then the filter counts it."""

    @property
    def left(self) -> float:
        """The part that may still be charged to the filter: 0 if plans fixed beforehand keep the whole budget."""
        return max(0.0, self.limit - self.spent)

    def fits(self, event: Event) -> bool:
        """Whether a run of this event could be released as a whole."""
        if self.plans is not None:
            return affords(self.budget, Composed((self.plans, event)))
        return self.filter.charge(event) <= self.left

    def steps(self, event_after: Callable[[int], Event], most: int) -> int:
        """Return the largest number of steps, at most `most`, whose `event_after` still fits."""
        validate.function(event_after=event_after)
        counts = range(1, validate.integer(most=most, minimum=0) + 1)
        return bisect_left(counts, True, key=lambda steps: not self.fits(event_after(steps)))

    def runs(self, epsilon: float, most: int = 10_000) -> int:
        """Return how many more runs fit, at most `most`, each of this epsilon at the budget's delta.

        Each is taken for a Gaussian mechanism: n of them are one that touches n sums. Runs of
        secretly sampled batches differ a little.
        """
        sigma = analytic_noise_multiplier(epsilon, self.budget[1])
        return self.steps(lambda runs: Gaussian(sigma, runs), most)

    def noise_multiplier(self, make_event: Callable[[float], Event]) -> float:
        """Return the smallest noise multiplier whose event still fits, rounded up.

        To a relative 1e-9, or 1e-4 while nothing is reserved.

        Raises
        ------
        BudgetError
            If none up to 1e7 does.
        """
        validate.function(make_event=make_event)
        low, high = 1e-4, 1e7
        close = 1e-9 if self.plans is None else 1e-4
        if not self.fits(make_event(high)):
            raise BudgetError(f"the ledger's budget leaves {self.left:.6g}, too little for any noise multiplier")
        while high > low * (1.0 + close):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.fits(make_event(middle)) else (middle, high)
        return high


@dataclass(frozen=True)
class Verification:
    """The result of `Ledger.verify`."""

    problems: tuple[str, ...]
    """One sentence each; empty if there are none."""
    entries: int
    """The number of entries read."""
    seal: str
    """The seal of the last entry, which represents the whole ledger up to there."""

    @property
    def valid(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


# Between machines and versions, figures may differ by rounding.
_TOLERANCE = 1e-9


# (steps, abandoned): the event of the first `steps` rows of a branch, and of the rows of the branches that were left.
EventAfter = Callable[[int, Sequence[Rows]], Event]


def event_of(event_after: EventAfter, steps: int, abandoned: Sequence[Rows] = ()) -> Event:
    """Return `event_after` of the steps and abandoned rows, checked to be an event."""
    return check_event(**{f"event_after({steps}, {abandoned})": event_after(steps, abandoned)})


def follow(state: State, previous: str, entry: Entry) -> str:
    """Apply an entry to the state; return its problem, or an empty string."""
    if entry.seal != seal(previous, entry.body):
        return f"entry {entry.number} was changed: its seal does not fit"
    try:
        state.apply(read_json(entry.body))
    except ValueError as cause:
        return f"entry {entry.number} {cause}"
    return ""


def check_plan(run: Run, event_after: EventAfter) -> None:
    """Refuse a plan whose events are not those in the ledger: it would recount rows that have left."""
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
    """Return the ledger's record of a run."""
    alike = ("run_id", "name", "begun", "adjacency", "steps", "releases", "charge", "description", "dataset")
    return RunRecord(
        **{name: getattr(run, name) for name in alike},
        forks=len(run.branches) - 1,
        event=Event.from_dict(run.event),
        planned=run.plan,
        marks={name: branch.mark for name, branch in run.branches.items()},
    )


def outside_plans(state: State) -> bool:
    """Whether rows were reserved outside the plans that were fixed beforehand."""
    runs = [run for run in state.runs.values() if run.releases]
    return not all(state.in_plan(run, run.mark, run.releases, Event.from_dict(run.event)) for run in runs)


def different_data(prints: int) -> str:
    """Return a sentence on runs whose data had several fingerprints."""
    return f"The runs saw data with {prints} different fingerprints; all of them are charged to the same people."


def notes(runs: Sequence[RunRecord], spent: float, exceeded: bool) -> tuple[str, ...]:
    """Return sentences for a reader of the total."""
    sentences = []
    prints = {run.dataset for run in runs if run.dataset}
    if len(prints) > 1:
        sentences.append(different_data(len(prints)))
    if len({run.adjacency for run in runs} - {None}) > 1:
        sentences.append("Add-remove and zero-out runs are mixed: the total holds under zero-out.")
    if exceeded:
        sentences.append("The budget is exceeded: an older copy of the ledger was put back, or rows left without it.")
    if math.isinf(spent):
        sentences.append("At least one release has no guarantee at all.")
    return tuple(sentences)


def verify(storage: Storage, connection: sqlite3.Connection, wanted: str | None) -> Verification:
    """Check everything; see `dpcore.ledger.Ledger.verify`."""
    import sqlite3

    problems = [
        f"SQLite finds: {text}" for (text,) in connection.execute("PRAGMA integrity_check").fetchall() if text != "ok"
    ]
    state, last = State(), START
    seen: set[str] = set()
    recomputed: dict[tuple[str, float | None], float] = {}
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
        problems.append(f"no entry has the seal {wanted}: the end was cut off, or this is another ledger")
    return Verification(tuple(problems), state.entries, last)


def _check_charge(state: State, entry: Entry, recomputed: dict[tuple[str, float | None], float]) -> list[str]:
    content = read_json(entry.body)
    if "charge" not in content:
        return []
    body = write(content["event"]), state.order  # which may become another one before the first release
    try:
        if body not in recomputed:
            event = Event.from_dict(content["event"])
            recomputed[body] = _filter(state).charge(event)
        stored = number_in(content["charge"])
    except (DpcoreError, ValueError) as cause:
        return [f"entry {entry.number} has an event that cannot be charged: {cause}"]
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
        problems.append(f"the limit is {state.limit!r}, but the budget allows {allowed!r}")
    plans = Composed(tuple(state.runs[run_id].plan for run_id in fixed.runs))
    if not _same(plans.to_dict(), fixed.event):
        problems.append("the event of the runs fixed beforehand is not that of their plans")
    if fixed.runs:
        epsilon = smallest_epsilon(plans, budget[1])[0]
        if epsilon > budget[0] * (1.0 + _TOLERANCE):
            problems.append(f"the runs fixed beforehand cost epsilon={epsilon!r}, more than the budget's {budget[0]!r}")
    spent = add(run.charge for run in state.runs.values())
    if fixed.alone and outside_plans(state):
        problems.append("the budget is exceeded: rows were reserved outside the plans that keep all of it")
    if not fixed.alone and spent > allowed * (1.0 + _TOLERANCE):
        problems.append(f"the budget is exceeded: {spent!r} is charged of {allowed!r}")
    return problems


def _filter(state: State) -> PrivacyFilter:
    # Without an order nothing was reserved, and nothing costs nothing at any order.
    return PrivacyFilter(state.header["composition"], state.order or DEFAULT_ORDER)
