"""Limits on the work that a statement may ask of its reader: a forged one could make the check endless.

Counted is what grows without bound in numbers that anybody can type: the rows of a strategy, the branches that a run
left, the parts of an event. What remains below the limits took under two minutes and 3 GB on one core.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from dpcore.accounting import Event
from dpcore.accounting.phases import phases
from dpcore.statement.statement import Statement

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
