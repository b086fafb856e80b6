"""What the accounting commands have in common: the accountant, the interval, and what is said beside a result."""

from __future__ import annotations

import math
from typing import Any

from dpcore import accounting
from dpcore.accounting import Event
from dpcore.cli.accounting.event_options import Question
from dpcore.cli.output import remarks, write_line
from dpcore.errors import PrivacyError
from dpcore.statement.text import format_epsilon, format_lower

INFINITE = "Infinite: there is no guarantee at all."


def chosen_accountant(event: Event, delta: float, asked: str | None) -> str:
    """Return the accountant asked for, or the one with the smallest epsilon: each gives an upper bound.

    Raises `PrivacyError` where none covers the event.
    """
    if asked is not None:
        return asked
    return min(_covering(event), key=lambda name: accounting.epsilon(event, delta, name))


def tightest_delta(event: Event, epsilon: float, asked: str | None) -> str:
    """Return the accountant asked for, or the one with the smallest delta at an epsilon."""
    if asked is not None:
        return asked
    return min(_covering(event), key=lambda name: accounting.delta(event, epsilon, name))


def _covering(event: Event) -> tuple[str, ...]:
    names = accounting.accountants_for(event)
    if not names:
        raise PrivacyError(f"event={type(event).__name__}: no accountant of this version covers it")
    return names


def every_epsilon(event: Event, delta: float) -> dict[str, float]:
    """Return epsilon by accountant, of all that cover the event, those for comparison among them."""
    table: dict[str, float] = {}
    for name in accounting.available_accountants():
        try:
            table[name] = accounting.epsilon(event, delta, name)
        except PrivacyError:
            continue
    return table


def every_delta(event: Event, epsilon: float) -> dict[str, float]:
    """Return delta by accountant, likewise."""
    table: dict[str, float] = {}
    for name in accounting.available_accountants():
        try:
            table[name] = accounting.delta(event, epsilon, name)
        except PrivacyError:
            continue
    return table


def write_certified(lower: float, upper: float, of: str) -> None:
    """Write the ends of a certified interval."""
    if math.isfinite(upper):
        write_line(f"certified: the smallest {of} lies in [{format_lower(lower)}, {format_epsilon(upper)}]")


def write_table(table: dict[str, float]) -> None:
    """Write a bound by accountant."""
    width = max(map(len, table), default=0)
    for name, value in table.items():
        write_line(f"  {name.ljust(width)}  {format_epsilon(value)}")


# Above it a delta is remarked on also where the number of examples is not known: few data sets have fewer than 1,000.
_LARGE_DELTA = 1e-3


def remark_on_delta(delta: float, question: Question, event: Event) -> str | None:
    """Remark on standard error where delta is not below 1/n, or is large and n unknown; return the sentence."""
    size = question.dataset_size if question.dataset_size is not None else accounting.known_dataset_size(event)
    sentence = accounting.delta_remark(delta, size)
    if sentence is not None:
        # With the digits in which the answer gives it; a value that was found has many more.
        sentence = accounting.delta_remark(min(float(format_epsilon(delta)), 0.9999), size)
    elif size is None:
        sentence = large_delta(delta)
    if sentence is not None:
        remarks().print(f"[yellow]remark:[/] {sentence}")
    return sentence


def large_delta(delta: float) -> str | None:
    """Return a sentence where a delta is large for any data set, whatever its size."""
    if delta <= _LARGE_DELTA:
        return None
    return (
        f"delta={format_epsilon(delta)}: ought to lie well below 1/n, and is below it for fewer than "
        f"{math.ceil(1.0 / delta):,} examples only"
    )


def described(event: Event) -> dict[str, Any]:
    """Return what every answer says of its event in JSON."""
    from dpcore.spec.canonical import plain

    return {"adjacency": str(event.adjacency), "event": plain(event.to_dict())}
