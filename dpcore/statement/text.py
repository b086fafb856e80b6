"""Statements and numbers as a person reads them."""

from __future__ import annotations

import math
import textwrap
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpcore.statement.statement import Statement

# So begins the note of a statement that counts steps before they are taken.
WRITTEN_BEFORE = "Written before"
_NEIGHBORS = {
    "add-remove": "one {unit} added or removed",
    "zero-out": "one {unit} replaced by one that contributes nothing",
    "replace-one": "one {unit} replaced by any other",
}
_SECTIONS = (
    ("Sampling", "sampler"), ("Clipping", "clip"), ("Noise", "noise"), ("Method", "method"),
    ("Accounted event", "event"), ("How epsilon follows from it", "derivation"), ("Randomness", "randomness"),
    ("Ledger", "ledger"), ("Software", "software"),
)  # fmt: skip


def format_epsilon(value: float, digits: int = 4) -> str:
    """Return epsilon rounded *up*, so that the text never states less than was spent; "infinite" where it is."""
    return _rounded(value, digits, ROUND_CEILING)


def _rounded(value: float, digits: int, rounding: str) -> str:
    if math.isinf(value):
        return "infinite"
    # Through repr: the double nearest to 2.7 lies above it, and 2.701 would only puzzle.
    rounded = Context(prec=digits, rounding=rounding).create_decimal(repr(float(value))).normalize()
    return f"{rounded:f}" if 1e-4 <= value < 1e9 or value == 0 else f"{rounded:e}".lower()


def format_delta(value: float) -> str:
    """Return delta to six digits, rounded up as epsilon is."""
    return format_epsilon(value, 6)


def format_lower(value: float, digits: int = 4) -> str:
    """Return a lower bound rounded *down*, as `format_epsilon` rounds up."""
    return _rounded(value, digits, ROUND_FLOOR)


def visible(text: str) -> str:
    """Return a text with what no person can see spelled out: a statement may have been written to mislead a terminal.

    Control characters, changes of the direction of writing, halves of characters and ends of lines become escapes.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def format_number(value: float) -> str:
    """Return a number the way a person types it: 1e-05 becomes 1e-5, 60000 stays 60000."""
    if isinstance(value, int):
        return str(value)
    text = f"{value:.6g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: 1 run, 1,438 runs; `many` is the plural where an s does not make it."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def statement_text(statement: Statement, width: int = 80) -> str:
    """Return the whole statement, headline first, in lines of at most `width` characters."""
    lines = ["Privacy statement", "=" * 17, ""]
    for paragraph in paragraphs(statement):
        lines += [*_wrap(paragraph, width, ""), ""]
    lines += ["Epsilon"]
    taken = f"after {statement.steps_taken:,} of {statement.steps_planned:,} steps"
    if statement.steps_abandoned:
        taken += f", and {statement.steps_abandoned:,} that were abandoned"
        if statement.rows_abandoned:
            taken += f" on {counted(len(statement.rows_abandoned), 'branch', 'branches')}"
    known = {name: _stated(value) for name, value in statement.epsilon.items()}
    if statement.epsilon_interval:
        ends = statement.epsilon_interval["lower"], statement.epsilon_interval["upper"]
        known["certified"] = f"the smallest lies in [{format_lower(ends[0])}, {format_epsilon(ends[1])}]"
    lines += _entries(known | {"counted": taken}, width, 2)
    if statement.epsilon_planned:
        planned = {name: _stated(value) for name, value in statement.epsilon_planned.items()}
        lines += ["", f"Epsilon after all {statement.steps_planned:,} planned steps", *_entries(planned, width, 2)]
    for title, name in _SECTIONS:
        content: dict[str, Any] = getattr(statement, name)
        if content:
            lines += ["", title, *_entries(content, width, 2)]
    if statement.caveats:
        lines += ["", "What this statement assumes and does not cover"]
        for caveat in statement.caveats:
            lines += _wrap(caveat, width, "  - ")
    lines += ["", "SHA-256", "  settings   " + statement.settings_hash, "  statement  " + statement.statement_hash]
    return "\n".join(map(visible, lines)) + "\n"


def paragraphs(statement: Statement) -> list[str]:
    """Return what a reader must know first, one paragraph each: the guarantee, its limits, what it means."""
    found = [headline(statement)]
    if statement.delta_is_small is False:
        n = statement.dataset_size
        found.append(
            f"WARNING: delta = {format_delta(statement.delta)} is not below 1/n = 1/{n}. A mechanism that publishes "
            f"one {statement.unit} chosen at random has such a delta; this one has not been shown to do better."
        )
    if statement.attacker and statement.private:
        found.append(_attack(statement))
    said = {"Note": statement.note, "Written": statement.date and f"{statement.date}."}
    return found + [f"{name}: {text}" for name, text in said.items() if text]


def _attack(statement: Statement) -> str:
    said: dict[str, Any] = statement.attacker
    rates = [
        f"{_percent(found)} at a false alarm rate of {_percent(float(rate))}"
        for rate, found in said["true_positive_rate"].items()
    ]
    unknown = f"whether one {statement.unit} counted"
    if statement.adjacency == "replace-one":
        unknown = f"which of two known ones one {statement.unit} is"
    return (
        f"What it means: whoever sees all that was released, and knows everything about the data but {unknown}, "
        f"finds out correctly with probability at most {' or '.join(rates)}; over all "
        f"tests the two rates differ by at most {_percent(said['advantage'])}."
    )


def _percent(share: float) -> str:
    """Return a bound in percent, rounded up."""
    return f"{format_epsilon(100 * share, 3)} %"


def headline(statement: Statement) -> str:
    """Return the guarantee in one or two sentences."""
    if not statement.private:
        return (
            f"NOT PRIVATE. Epsilon is infinite: nothing is guaranteed about any {statement.unit}, and what this run "
            "produced must be handled like the training data itself."
        )
    neighbors = _NEIGHBORS.get(statement.adjacency.replace("_", "-"), "").format(unit=statement.unit)
    meaning = f": data sets are neighbors if they differ in {neighbors}" if neighbors else ""
    return (
        f"What this run released is (epsilon, delta)-differentially private with epsilon = "
        f"{format_epsilon(statement.best_epsilon)} and delta = {format_delta(statement.delta)}, "
        f"for {statement.adjacency} adjacency{meaning}."
    )


def _stated(value: float) -> str:
    return "infinite (this accountant gives no guarantee)" if math.isinf(value) else format_epsilon(value)


def _entries(content: dict[str, Any], width: int, indent: int) -> list[str]:
    flat = {key: value for key, value in content.items() if not isinstance(value, dict)}
    column = min(30, max((len(key) for key in flat), default=0)) + indent + 2
    lines = []
    for key, value in content.items():
        label = " " * indent + key.replace("_", " ")
        if isinstance(value, dict):
            lines += [label, *_entries(value, width, indent + 2)]
            continue
        lead = label.ljust(column) if len(label) < column else label + "  "
        lines += textwrap.wrap(
            # What a ledger spent is nested here, and never rounded down either.
            format_epsilon(value) if key.startswith("epsilon") and isinstance(value, float) else _value(value),
            width,
            initial_indent=lead,
            subsequent_indent=" " * min(len(lead), column),
            break_on_hyphens=False,
        ) or [label]
    return lines


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return format_number(value)
    if isinstance(value, list):
        return "; ".join(
            ", ".join(f"{key} {_value(inner)}" for key, inner in item.items())
            if isinstance(item, dict)
            else _value(item)
            for item in value
        )
    return "infinite" if value == "inf" else str(value)


def _wrap(text: str, width: int, bullet: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_on_hyphens=False
    )
