"""The card of a trained model: what it guarantees, what it was trained on, how to check it."""

import hashlib
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from dpcore.errors import ArgumentTypeError
from dpcore.statement.statement import Statement, paragraphs
from dpcore.statement.text import format_delta, format_epsilon, format_lower, format_number, visible

METADATA = """---
library_name: dpcore
tags:
- differential-privacy
---
"""
_TRAINED, _CHECK, _FILES = "## What was trained", "## How to check it", "## Files"
_DIGEST = re.compile(r"^\| `([^`]+)` \| `([0-9a-f]{64})` \|$", re.MULTILINE)
# A cell has its bars escaped; the rule beneath the head of a table is no row.
_ROW = re.compile(r"^\| (?!---)((?:\\\||[^|\n])+) \| ((?:\\\||[^|\n])*) \|$", re.MULTILINE)


def model_card(
    statement: Statement,
    *,
    title: str = "A privately trained model",
    trained: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> str:
    """Return the card as Markdown with a metadata header, as model hubs read it.

    Parameters
    ----------
    statement : Statement
        Of the run that made the model.
    title : str
        One line.
    trained : mapping of str to str or number, optional
        Public facts about model and data ("parameters": 7,850), one row each. They are published.
    files : mapping of str to bytes, optional
        Files in the card's folder; each is listed with its SHA-256.
    """
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in (files or {}).items()}
    rows = {}
    for name, value in (trained or {}).items():
        if not isinstance(value, (str, int, float)):
            raise ArgumentTypeError(f"trained[{name!r}]={type(value).__name__}: must be text or a number")
        rows[name] = (
            format_number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        )
    return _card(statement, title, rows, digests)


def listed(card: str) -> dict[str, str]:
    """Return the SHA-256 of each file that a card lists, by name."""
    return dict(_DIGEST.findall(card.partition(f"\n{_FILES}\n")[2]))


def facts(card: str) -> dict[str, str]:
    """Return the rows of a card's table of what was trained."""
    part = card.partition(f"\n{_TRAINED}\n")[2].partition(f"\n{_CHECK}\n")[0]
    return {name.replace("\\|", "|"): value.replace("\\|", "|") for name, value in _ROW.findall(part)}


def card_again(statement: Statement, card: str) -> str:
    """Return the card of a statement with the title, the facts about the model and the digests of `card`.

    If that equals `card`, everything else in it follows from the statement.
    """
    title = next((line for line in card.splitlines() if line.startswith("# ")), "# ")[2:]
    own = _facts(statement)
    trained = {name: value for name, value in facts(card).items() if name not in own}
    return _card(statement, title, trained, listed(card))


def _card(statement: Statement, title: str, trained: dict[str, str], digests: Mapping[str, str]) -> str:
    lines = [METADATA, f"# {_one_line(title)}", "", "## Privacy", ""]
    for paragraph in paragraphs(statement):
        lines += [*textwrap.wrap(_escaped(paragraph), 100, break_on_hyphens=False), ""]
    lines += [*_table(_privacy(statement)), "", _TRAINED, ""]
    lines += [*_table(_facts(statement) | trained), "", _CHECK, ""]
    lines += [
        "`statement.json` holds every setting that the guarantee rests on, and `statement.txt` the same for a person.",
        "",
        "    pip install dpcore",
        "    dpcore verify statement.json",
        "",
        "derives the events again from these settings, and every epsilon from the events. It cannot tell whether the",
        "run took place as described, with keys that stayed secret.",
        "",
        "## What is assumed and not covered",
        "",
    ]
    for caveat in statement.caveats:
        lines += textwrap.wrap(
            _escaped(caveat), 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
        )
    if digests:
        lines += ["", _FILES, "", "| file | SHA-256 |", "| --- | --- |"]
        lines += [f"| `{name}` | `{sha256}` |" for name, sha256 in digests.items()]
    return "\n".join([lines[0], *map(visible, lines[1:])]) + "\n"


def _privacy(statement: Statement) -> dict[str, str]:
    rows = {
        "epsilon": format_epsilon(statement.best_epsilon) if statement.private else "infinite: NOT PRIVATE",
        "delta": format_delta(statement.delta),
        "adjacency": statement.adjacency,
        "unit of privacy": f"one {statement.unit}",
        "steps": f"{statement.steps_taken:,} of {statement.steps_planned:,}"
        + (f", and {statement.steps_abandoned:,} abandoned" if statement.steps_abandoned else ""),
    }
    if statement.epsilon_interval and statement.private:
        ends = statement.epsilon_interval
        rows["certified"] = (
            f"the smallest epsilon lies in [{format_lower(ends['lower'])}, {format_epsilon(ends['upper'])}]"
        )
    if statement.ledger:
        rows["ledger"] = f"{statement.ledger.get('ledger', '')}, run {statement.ledger.get('run', '')}"
    return rows | {"settings (SHA-256)": f"`{statement.settings_hash}`"}


def _facts(statement: Statement) -> dict[str, str]:
    sampler, noise, size = statement.sampler, statement.noise, statement.dataset_size
    # A norm that is adapted takes its sensitivity along.
    sensitivity = format_number(statement.clip["sensitivity"])
    if "adaptive" in statement.clip:
        sensitivity += " at the first step"
    return {
        "method": str(statement.method.get("name", "custom")),
        f"{statement.unit}s": "not stated" if size is None else f"{size:,}",
        "sampling": f"{sampler.get('sampler', '')}, {format_number(sampler.get('expected_batch_size', 0))} a step",
        "clipping": f"{statement.clip.get('rule', '')}, sensitivity {sensitivity}",
        "noise multiplier": format_number(noise.get("noise_multiplier", 0.0)),
        "made with": ", ".join(f"{name} {version}" for name, version in statement.software.items()),
    }


def _table(rows: Mapping[str, str]) -> list[str]:
    cells = ([_one_line(text).replace("|", "\\|") for text in row] for row in rows.items())
    return ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in cells)]


def _one_line(text: str) -> str:
    return " ".join(str(text).split())


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*")
