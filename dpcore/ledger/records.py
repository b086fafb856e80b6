"""The answers of a ledger: immutable, and plain enough for JSON."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dpcore.accounting import Composed, Event, smallest_epsilon
from dpcore.errors import BudgetError
from dpcore.ledger.entries import number_out
from dpcore.ledger.fixed import affords
from dpcore.ledger.privacy_filter import PrivacyFilter
from dpcore.spec import validate


@dataclass(frozen=True)
class RunRecord:
    """A run as the ledger holds it."""

    run_id: str
    name: str
    begun: str
    """UTC time in ISO format."""
    adjacency: str | None
    """None where nothing is guaranteed."""
    steps: int
    """Rows planned."""
    releases: int
    """Rows reserved and not given back, over all branches."""
    forks: int
    event: Event
    """What those rows release at most."""
    planned: Event
    """What the whole run releases as it was planned."""
    charge: float
    """Of `event`, to the ledger's filter."""
    description: Any
    """The settings, as they were told."""
    dataset: str
    """Fingerprint of the data."""
    marks: dict[str, int]
    """Of each branch: rows below it may have left."""

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of this run alone at `delta`."""
        return smallest_epsilon(self.event, delta)[0]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        events = {"event": self.event.to_dict(), "planned": self.planned.to_dict()}
        return {**vars(self), **events, "charge": number_out(self.charge)}


@dataclass(frozen=True)
class Total:
    """What all runs of a ledger cost together."""

    delta: float
    adjacency: str | None
    """Zero-out where add-remove and zero-out runs are mixed; None where there is no run, or no guarantee."""
    runs: int
    fixed: float
    """Epsilon as if all runs had been fixed beforehand: the smallest of the accountants. It does **not** cover settings
    that were chosen after looking at earlier results."""
    accountant: str
    """Whose that is; empty where nothing was released."""
    budget: float | None
    """Epsilon of all that may still come, too, however it is chosen: the budget's at `delta`, or that of `plan` where
    nothing else can come. The ledger stops before it is crossed. None without a budget."""
    odometer: float
    """Epsilon of what was released so far, however the runs were chosen and whenever one looks. That costs more than to
    hold at the budget's end alone, so it is a larger part of the budget's epsilon than `spent` is of `limit`."""
    spent: float
    """The filter's sum."""
    limit: float | None
    """Where that stops; None without a budget."""
    plan: float | None = None
    """Epsilon of the whole plans of the runs that were fixed before the first release; None where there are none, or no
    budget."""
    fixed_runs: tuple[str, ...] = ()
    """Their ids."""
    alone: bool = False
    """Whether those plans keep the whole budget, so that no later run can be paid for (`dpcore.ledger.fixed`)."""
    kept: float = 0.0
    """Of the limit: kept free for the rest of those plans as long as living processes may come to it."""
    notes: tuple[str, ...] = ()

    @property
    def filter(self) -> float:
        """Epsilon to be stated however the runs were chosen: the budget's, or the odometer's where there is none.

        0 where nothing was released.
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
    """What a budget leaves."""

    filter: PrivacyFilter
    spent: float
    """The filter's sum so far, what is kept free for runs fixed beforehand included."""
    limit: float
    """Where the sum stops."""
    budget: tuple[float, float]
    """Its epsilon and delta."""
    plans: Event | None = None
    """The plans of runs that were begun, while nothing is reserved: a further run is then fixed beforehand, too, and
    what is left is counted by the tightest accountant. None afterwards: then by the filter."""

    @property
    def left(self) -> float:
        """What may still be charged to the filter: 0 where plans fixed beforehand keep the whole budget."""
        return max(0.0, self.limit - self.spent)

    def fits(self, event: Event) -> bool:
        """Whether a run of this event could be released as a whole."""
        if self.plans is not None:
            return affords(self.budget, Composed((self.plans, event)))
        return self.filter.charge(event) <= self.left

    def steps(self, event_after: Callable[[int], Event], most: int) -> int:
        """Return the largest number of steps, at most `most`, of which `event_after` still fits."""
        validate.function(event_after=event_after)
        counts = range(1, validate.integer(most=most, minimum=0) + 1)
        return bisect_left(counts, True, key=lambda steps: not self.fits(event_after(steps)))

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
    """What `Ledger.verify` found."""

    problems: tuple[str, ...]
    """One sentence each; empty where all is well."""
    entries: int
    """How many were read."""
    seal: str
    """Of the last one: it stands for the whole ledger up to there."""

    @property
    def valid(self) -> bool:
        """Whether no problem was found."""
        return not self.problems
