"""What a ledger holds already, for ``dpcore calibrate --ledger``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcore.accounting import Composed
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.report.text import format_epsilon, format_number


@dataclass(frozen=True)
class Spent:
    """The runs of a ledger, as one event.

    Parameters
    ----------
    name : str
        The ledger's.
    runs : int
        How many it holds.
    event : Composed
        What they release at most, all together.
    budget : (float, float) or None
        Its epsilon and delta.
    """

    name: str
    runs: int
    event: Composed
    budget: tuple[float, float] | None

    def target(self, epsilon: float | None, delta: float | None) -> tuple[float | None, float | None]:
        """Return the target: as given, or where neither was, the ledger's budget."""
        if epsilon is None and delta is None and self.budget is not None:
            return self.budget
        if epsilon is None:
            raise ArgumentError("epsilon: give the target for all runs together, for the ledger has no budget")
        return epsilon, delta

    @property
    def words(self) -> str:
        """One sentence for a person."""
        held = f"{self.runs:,} run{'' if self.runs == 1 else 's'}"
        ends = "" if self.budget is None else _budget(self.budget)
        return (
            f"together with the {held} of the ledger {self.name}{ends}, as if all had been fixed beforehand; a run "
            "that was chosen by earlier results is held to less by the ledger itself (dpcore ledger show)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the same for JSON."""
        return {"ledger": self.name, "runs": self.runs, "budget": None if self.budget is None else list(self.budget)}


def _budget(budget: tuple[float, float]) -> str:
    return f" (budget: epsilon = {format_epsilon(budget[0])} at delta = {format_number(budget[1])})"


def spent_of(path: Path) -> Spent:
    """Read a ledger, without changing it.

    Raises
    ------
    DpcoreError
        As `dpcore.ledger.Ledger.open`.
    PrivacyError
        Where one of its runs has no guarantee.
    """
    from dpcore.ledger import Ledger

    ledger = Ledger.open(path, read_only=True)
    runs = ledger.runs()
    lost = [run.name for run in runs if run.event.adjacency is None and run.releases]
    if lost:
        raise PrivacyError(f"ledger: its run {lost[0]!r} has no guarantee, so that nothing is left for another one")
    return Spent(ledger.name or path.name, len(runs), Composed(tuple(run.event for run in runs)), ledger.budget)
