"""The part of a comparison that a ledger's budget pays for: told before the first run, and asked before each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpcore.accounting import Adjacency, Composed, Event
from dpcore.errors import PrivacyError
from dpcore.statement.text import counted

if TYPE_CHECKING:
    from dpcore.ledger import Ledger


def ledger_for(path: Path, events: Sequence[Event]) -> Ledger:
    """Open the ledger; PrivacyError where it would refuse one of these plans' events after others were paid for."""
    from dpcore.ledger import Ledger

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
    from dpcore.ledger.privacy_filter import PrivacyFilter, order_for

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
