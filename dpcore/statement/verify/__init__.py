"""Checks a privacy statement: all that it says is derived again from its settings, and every epsilon from its events.

A statement that passes is consistent: the sampler, clip and noise that it describes have the events that it states, and
those have the epsilons that it states. Whether the run took place as described, with keys that stayed secret, no
computation can tell; what is taken on trust is listed as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dpcore.errors import DpcoreError
from dpcore.spec.canonical import read_json
from dpcore.statement.statement import Statement
from dpcore.statement.verify.compare import compared
from dpcore.statement.verify.finding import FAILED, OK, TRUSTED, Finding
from dpcore.statement.verify.limits import too_much
from dpcore.statement.verify.rebuild import rebuilt
from dpcore.statement.verify.totals import ledger_total

__all__ = ["FREE_TEXT", "Finding", "holds", "verify"]

FREE_TEXT = (
    "note, date, software, ledger, and caveats beyond those that the settings need, which are counted",
    "the name of the method, and all of it that works on released vectors: query, filter, update, schedule, ...",
    "randomness.key and randomness.rng among known names; the digest of the noise's layout",
    "a fixed order's shuffle and drop_last, and its counts, where no event depends on them",
    "which rows the branches left behind have, where no event depends on it",
    "how often an example takes part under lists of batches and samplers of the caller's own: reported as trusted",
    "how far a matrix known by a digest moves it, within bounds, and what unknown stages do: reported as trusted",
)
"""What only the hash of the statement covers, which whoever changes a statement on purpose can renew."""

# Also what numerical routines end with at numbers that no run has: no convergence, too large an array.
_WRONG = (DpcoreError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError,
          RuntimeError, MemoryError)  # fmt: skip


def verify(statement: Statement | Mapping[str, Any] | str) -> list[Finding]:
    """Check a statement; return one finding or more for each check, in a fixed order.

    Parameters
    ----------
    statement : Statement, mapping or str
        A statement, what `Statement.to_dict` returned, or JSON. What stands in it is a finding, never an exception.
    """
    try:
        content = read_json(statement) if isinstance(statement, str) else statement
        raw = content.to_dict() if isinstance(content, Statement) else content
        read = Statement.unchecked(raw)
        found = [Finding("form", OK, f"format {raw['format']}"), *_hashes(raw, read)]
        trusted, problem = list(_trusted(read)), too_much(read)
    except RecursionError:
        return [Finding("form", FAILED, "is nested too deeply")]
    except _WRONG as cause:
        return [Finding("form", FAILED, _words(cause))]
    if problem is not None:
        return [*found, Finding("size", FAILED, f"cannot be checked: {problem}"), *trusted]
    if raw["delta_is_below_1/n"] is not read.delta_is_small:
        found.append(Finding("delta", FAILED, "delta_is_below_1/n is not what delta and n say"))
    # What overflows in numbers that no run has is found by its result.
    with np.errstate(all="ignore"):
        found += _checked(read)
    found += ledger_total(read)
    return [*found, *trusted]


def holds(findings: Iterable[Finding]) -> bool:
    """Whether no check failed."""
    return all(finding.status != FAILED for finding in findings)


def _checked(read: Statement) -> list[Finding]:
    found = list[Finding]()
    try:
        plan, found = rebuilt(read)
        found += compared(read, plan)
    except _WRONG as cause:
        found.append(Finding("plan", FAILED, _words(cause)))
    return found


def _hashes(raw: Mapping[str, Any], read: Statement) -> Iterable[Finding]:
    for name in ("settings_hash", "statement_hash"):
        label, derived = name.replace("_", " "), getattr(read, name)
        if raw[name] == derived:
            yield Finding(label, OK, derived[:16] + "...")
        else:
            what = "the settings were" if name == "settings_hash" else "something was"
            yield Finding(label, FAILED, f"{what} changed after the statement was written")


def _trusted(statement: Statement) -> Iterable[Finding]:
    words = f"that these {statement.steps_taken:,} steps were taken, as described"
    if statement.steps_abandoned or statement.randomness.get("forks"):
        words += f", and {statement.steps_abandoned:,} others on the branches that it left"
    yield Finding("the run itself", TRUSTED, words)
    yield Finding("the keys", TRUSTED, "that they are secret, and used for this run only")
    if statement.ledger:
        yield Finding(
            "ledger", TRUSTED, f"{statement.ledger.get('ledger', '')}: compare with dpcore verify --ledger FILE"
        )
    if statement.note or statement.date:
        yield Finding("note and date", TRUSTED, "free text")


def _words(cause: BaseException) -> str:
    if isinstance(cause, KeyError):
        return f"{cause.args[0]!r} is missing"
    return " ".join(str(cause).split())[:300] or type(cause).__name__
