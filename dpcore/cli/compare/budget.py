"""The part of a comparison that a ledger's budget pays for, told before the first run."""

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


def remark(ledger: Ledger, events: Sequence[Event]) -> str | None:
    """Return a sentence where the budget ends before runs of these events, made one after the other; or None."""
    paid = whole_runs(ledger, events)
    if paid == len(events):
        return None
    return (
        f"the ledger's budget pays for {paid or 'none'} of the {counted(len(events), 'run')} to come, made one "
        "after the other; the comparison stops before it is crossed, and what was spent until then is spent"
    )


def whole_runs(ledger: Ledger, events: Sequence[Event]) -> int:
    """Return how many runs of these events come to their end, one after the other and from the first on.

    As `dpcore.ledger.allowance` decides: what is begun before the first row is fixed beforehand if the budget
    affords it, and settles the filter's order; all that comes later is held to the filter.
    """
    from dpcore.ledger.privacy_filter import PrivacyFilter, order_for

    if ledger.budget is None or not events:
        return len(events)
    left = ledger.remaining()
    chosen, spent, limit = left.filter, left.spent, left.limit
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
