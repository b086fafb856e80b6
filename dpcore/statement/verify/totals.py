"""What a statement says of its ledger's total, beside what it says of its own run: the total holds the run."""

from __future__ import annotations

from collections.abc import Iterator

from dpcore.statement.statement import Statement
from dpcore.statement.text import WRITTEN_BEFORE, format_epsilon
from dpcore.statement.verify.finding import FAILED, OK, TRUSTED, Finding

_ROUNDING = 1e-6


def ledger_total(statement: Statement) -> Iterator[Finding]:
    """Give the finding on a ledger's total, where there is one: epsilon of all its runs is at least that of this one.

    More releases never have a smaller epsilon, and each of the two figures stated is one of them: of all that was
    released as if fixed beforehand, and the bound of the filter, which the run is within.
    """
    if "total" not in statement.ledger:  # `minimize` states none
        return
    name, own = "ledger's total", statement.best_epsilon
    try:
        total = statement.ledger["total"]
        figures = [float(total[key]) for key in ("epsilon", "epsilon_if_fixed_beforehand")]
        same_delta = float(total["delta"]) == statement.delta
    except (LookupError, TypeError, ValueError) as cause:
        yield Finding(name, FAILED, f"cannot be read ({type(cause).__name__})")
        return
    if not same_delta:
        yield Finding(name, FAILED, f"is stated at delta = {total['delta']}, and the run at {statement.delta}")
    elif all(figure >= own * (1 - _ROUNDING) for figure in figures):
        yield Finding(name, OK, f"epsilon = {format_epsilon(min(figures))}, not below that of this run")
    elif statement.note.startswith(WRITTEN_BEFORE):
        yield Finding(name, TRUSTED, "is from before the steps that are counted here")
    else:
        words = (
            f"epsilon = {min(figures):.4g} for all runs is below epsilon = {own:.4g} of this one, which is among them"
        )
        yield Finding(name, FAILED, words)
