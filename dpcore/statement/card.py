"""The card of a trained model: its guarantee, its training, how to check it."""

import hashlib
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from dpcore.errors import ArgumentTypeError
from dpcore.statement.statement import Statement
from dpcore.statement.text import format_number, visible

METADATA = """---
library_name: dpcore
tags:
- differential-privacy
---
"""
TITLE = "A privately trained model"
_TRAINED, _CHECK, _FILES = "## What was trained", "## How to check it", "## Files"
_DIGEST = re.compile(r"^\| `([^`]+)` \| `([0-9a-f]{64})` \|$", re.MULTILINE)
# A cell has its bars escaped; the line below the head of a table is no row.
_ROW = re.compile(r"^\| (?!---)((?:\\\||[^|\n])+) \| ((?:\\\||[^|\n])*) \|$", re.MULTILINE)


def model_card(
    statement: Statement,
    *,
    title: str = TITLE,
    trained: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> str:
    """Return the card as Markdown with a metadata header, as model hubs read it.

    Parameters
    ----------
    statement : Statement
        Statement of the run that made the model.
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


def card_again(statement: Statement, card: str) -> str:
    """Return the card of a statement with the title, the facts about the model and the digests of `card`.

    If that equals `card`, everything else in it follows from the statement.
    """
    title = next((line for line in card.splitlines() if line.startswith("# ")), "# ")[2:]
    part = card.partition(f"\n{_TRAINED}\n")[2].partition(f"\n{_CHECK}\n")[0]
    trained = {name.replace("\\|", "|"): value.replace("\\|", "|") for name, value in _ROW.findall(part)}
    return _card(statement, title, trained, listed(card))


def _card(statement: Statement, title: str, trained: dict[str, str], digests: Mapping[str, str]) -> str:
    cells = ([_one_line(text).replace("|", "\\|") for text in row] for row in trained.items())
    lines = [METADATA, f"# {_one_line(title)}", "", "## Privacy", "", "```text"]
    lines += [*statement.summary(100).rstrip().splitlines(), "```", "", _TRAINED, "", "| | |", "| --- | --- |"]
    lines += [*(f"| {name} | {value} |" for name, value in cells), "", _CHECK, ""]
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
        text = caveat.replace("<", "&lt;").replace("*", "\\*")
        lines += textwrap.wrap(text, 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    if digests:
        lines += ["", _FILES, "", "| file | SHA-256 |", "| --- | --- |"]
        lines += [f"| `{name}` | `{sha256}` |" for name, sha256 in digests.items()]
    return "\n".join([lines[0], *map(visible, lines[1:])]) + "\n"


def _one_line(text: str) -> str:
    return " ".join(str(text).split())
