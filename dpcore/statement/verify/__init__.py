"""Checks a privacy statement: all that it says is derived again from its settings, and every epsilon from its events.

A statement that passes is consistent: the sampler, clip and noise that it describes have the events that it states, and
those have the epsilons that it states. Whether the run took place as described, with keys that stayed secret, no
computation can tell; what is taken on trust is listed as such.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from dpcore.accounting import Event
from dpcore.accounting.phases import phases
from dpcore.errors import DpcoreError
from dpcore.spec.canonical import read_json
from dpcore.statement.statement import Statement
from dpcore.statement.text import WRITTEN_BEFORE, format_epsilon
from dpcore.statement.verify.compare import compared
from dpcore.statement.verify.finding import FAILED, OK, TRUSTED, Finding
from dpcore.statement.verify.rebuild import rebuilt

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


# Limits on the work that a statement may ask of its reader: a forged one could make the check endless.
#
# Counted is what grows without bound in numbers that anybody can type: the rows of a strategy, the branches that a run
# left, the parts of an event. What remains below the limits took under two minutes and 3 GB on one core.


OPERATIONS: Final = 1e11
ENTRIES: Final = 1.5e8
"""Of float64 arrays held at once."""
PARTS: Final = 50_000
"""Of an event, and branches that count one by one."""
SAMPLED: Final = 8
"""Different kinds of sampled steps in one event; the library's own samplers make one."""

_CHUNK = 256  # columns of a strategy at once


def too_much(statement: Statement) -> str | None:
    """Return what goes beyond a limit, in words; None where the statement can be checked."""
    strategy = statement.noise.get("strategy")
    if strategy is not None:
        apart = len(statement.rows_abandoned) or statement.steps_abandoned
        if apart > PARTS:
            return f"{apart:,} abandoned branches, at most {PARTS:,} are checked"
        work, entries = _of_strategy(statement, strategy)
        if work > OPERATIONS or entries > ENTRIES:
            return (
                f"the strategy of {_rows(statement, strategy):,} rows would take {work:.0e} operations on "
                f"{entries:.0e} numbers, at most {OPERATIONS:.0e} on {ENTRIES:.0e} are spent"
            )
    for described in (statement.event, statement.event_planned):
        count = sum(1 for _ in _nodes(described))
        if count > PARTS:
            return f"an event of {count:,} parts, at most {PARTS:,} are checked"
        found = phases(Event.from_dict(described))
        if found is not None and len(found.steps) > SAMPLED:
            return f"an event of {len(found.steps):,} different sampled steps, at most {SAMPLED} are checked"
    return None


def _rows(statement: Statement, strategy: dict[str, Any]) -> int:
    return max(statement.steps_planned, int(strategy.get("steps") or 0))


def _of_strategy(statement: Statement, strategy: dict[str, Any]) -> tuple[float, float]:
    """Return about how many operations, and how many numbers at once, its sensitivity takes."""
    sampler = statement.sampler.get("sampler")
    rows, kind = float(min(_rows(statement, strategy), 10**15)), strategy.get("kind")
    width = max([len(value) for value in strategy.values() if isinstance(value, list)], default=1)
    work, entries = rows * (40 * rows + width**2), rows * _CHUNK  # every column once, made and added up
    if kind == "banded-toeplitz" and width < _CHUNK and sampler in ("fixed order", "shuffled"):
        work, entries = rows * (1e4 + width**2), rows * width  # from the bands themselves
    if kind == "tree-optimal":
        work, entries = work + rows**3 / 3, entries + 4 * rows**2
    epoch = max(int(statement.sampler.get("steps_per_epoch") or 1), 1)
    if sampler == "shuffled" and kind != "identity":
        work, entries = work + rows**3 / 3, entries + 3 * rows * min(rows, epoch)
    elif kind in ("blt", "banded-inverse-toeplitz") or width >= _CHUNK:
        met = math.ceil(rows / epoch)  # entries of C may be negative: all products of the columns of a pattern
        work, entries = work + rows * met**2, entries + rows * met
    return work, entries


def _nodes(event: Any) -> Iterator[Any]:
    stack = [event]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
