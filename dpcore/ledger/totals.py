"""The total of a ledger's runs, and the rest of its budget."""

from __future__ import annotations

import math

from dpcore.accounting import Composed, Event, smallest_epsilon
from dpcore.errors import ArgumentError
from dpcore.ledger import checks
from dpcore.ledger.allowance import Allowance
from dpcore.ledger.records import Remaining, Total
from dpcore.spec import validate


def total(rows: Allowance, delta: float | None) -> Total:
    """Return what all runs cost together; see `dpcore.ledger.Ledger.total`."""
    with rows.book.reading() as draft:
        runs = tuple(checks.record(run) for run in rows.book.state.runs.values())
        spent, counted = rows.spent, rows.counted(draft)
        state = rows.book.state
        fixed, alone, beside = state.fixed, state.fixed is not None and state.fixed.alone, checks.beside(state)
    exceeded = beside if alone else rows.limit is not None and spent > rows.limit
    if delta is None and rows.budget is None:
        raise ArgumentError("delta=None: must be given, since the ledger has no budget to take it from")
    chosen = validate.open_unit(delta=rows.budget[1] if delta is None and rows.budget is not None else delta)
    whole = Composed(tuple(run.event for run in runs if run.releases))
    epsilon, accountant = smallest_epsilon(whole, chosen) if whole.events else (0.0, "")
    limit = rows.limit
    plan = None
    if fixed is not None and fixed.runs:
        plan = smallest_epsilon(Event.from_dict(fixed.event), chosen)[0]
    odometer = rows.filter.odometer(spent, chosen)
    budget = None if limit is None else rows.filter.epsilon(max(limit, spent), chosen)
    if alone and not beside:
        budget = plan
    elif exceeded and budget is not None:  # where the sum stopped was fixed by nobody
        budget = max(budget, odometer)
    return Total(
        delta=chosen,
        adjacency=None if whole.adjacency is None else str(whole.adjacency),
        runs=len(runs),
        fixed=epsilon,
        accountant=accountant,
        budget=budget,
        plan=plan,
        fixed_runs=() if fixed is None else fixed.runs,
        alone=alone,
        odometer=odometer,
        spent=spent,
        kept=max(0.0, counted - spent) if math.isfinite(counted) else 0.0,
        limit=limit,
        notes=checks.notes(runs, spent, exceeded),
    )


def remaining(rows: Allowance) -> Remaining:
    """Return what the budget leaves; see `dpcore.ledger.Ledger.remaining`."""
    if rows.budget is None:
        raise ArgumentError(f"budget=None: the ledger {rows.book.path} has none, so there is no end to what is left")
    with rows.book.reading() as draft:
        state, limit = rows.book.state, rows.limit
        assert limit is not None
        plans = [run.plan for run in state.runs.values() if draft.alive(run)]
        first = None if state.fixed is not None else Composed(tuple(plans))
        kept = state.fixed is not None and state.fixed.alone
        return Remaining(rows.filter, limit if kept else rows.counted(draft), limit, rows.budget, first)
