"""The rest of a ledger's budget, for ``dpcore calibrate --ledger``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcore.accounting import Composed, Event
from dpcore.errors import ArgumentError, BudgetError, PrivacyError
from dpcore.statement.text import counted, format_epsilon, format_number

if TYPE_CHECKING:
    from dpcore.ledger import Remaining


@dataclass(frozen=True)
class Spent:
    """The runs of a ledger, as one event: all that they release at most.

    `left` is what the budget leaves; None where there is no budget, or where nothing is left of it for another run.
    """

    name: str
    runs: int
    event: Composed
    budget: tuple[float, float] | None
    left: Remaining | None

    def target(self, epsilon: float | None, delta: float | None) -> tuple[float | None, float | None]:
        """Return the target: as given, or where neither was, the ledger's budget."""
        if epsilon is None and delta is None and self.budget is not None:
            return self.budget
        if epsilon is None:
            raise ArgumentError("epsilon: give the target for all runs together, for the ledger has no budget")
        return epsilon, delta

    def pays_for(self, unknown: str, value: float, make_event: Callable[[Any], Event]) -> float | None:
        """Return what the ledger itself pays for: the value that was found, another one, or None.

        The value was found as if all runs had been fixed beforehand. What begins after a release may have been chosen
        by looking at it, and the ledger holds it to its filter, which allows less. `make_event` makes the run's event
        of a value of the `unknown`, which is written as an option.
        """
        if self.budget is None:
            return value
        if self.left is None:
            return None
        if self.left.fits(make_event(value)):
            return value
        if unknown == "steps":
            return self.left.steps(make_event, int(value)) or None
        if unknown == "noise-multiplier":
            try:
                return self.left.noise_multiplier(make_event)
            except BudgetError:
                return None
        return None

    def words(self, unknown: str, found: float, granted: float | None) -> list[str]:
        """Return the same for a person, and what the value holds for."""
        held = counted(self.runs, "run")
        ends = "" if self.budget is None else _budget(self.budget)
        first = f"together with the {held} of the ledger {self.name}{ends}, as if all had been fixed beforehand"
        if self.budget is None:
            return [first, "it has no budget and stops nothing (dpcore ledger show)"]
        if granted is None:
            return [first, "the ledger does NOT pay for this run as a whole (dpcore ledger show)"]
        if granted == found:
            return [first, "the ledger pays for this run as a whole"]
        less = f"pays for {counted(int(granted), 'step')} only"
        if unknown != "steps":
            less = f"asks for noise multiplier = {format_epsilon(granted, digits=6)}"
        return [first, f"the ledger itself {less}: it covers runs that are chosen by looking at earlier ones, too"]

    def to_dict(self, granted: float | None) -> dict[str, Any]:
        """Return the same for JSON."""
        budget = None if self.budget is None else list(self.budget)
        return {"ledger": self.name, "runs": self.runs, "budget": budget, "pays_for": granted}


def _budget(budget: tuple[float, float]) -> str:
    return f" (budget: epsilon = {format_epsilon(budget[0])} at delta = {format_number(budget[1])})"


def spent_of(path: Path) -> Spent:
    """Read a ledger, without changing it; PrivacyError where one of its runs has no guarantee."""
    from dpcore.ledger import Ledger

    ledger = Ledger.open(path, read_only=True)
    runs = ledger.runs()
    lost = [run.name for run in runs if run.event.adjacency is None and run.releases]
    if lost:
        raise PrivacyError(f"ledger: its run {lost[0]!r} has no guarantee, so that nothing is left for another one")
    left = None if ledger.budget is None or ledger.total().alone else ledger.remaining()
    event = Composed(tuple(run.event for run in runs))
    return Spent(ledger.name or path.name, len(runs), event, ledger.budget, left)
