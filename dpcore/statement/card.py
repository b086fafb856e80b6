"""The card that lies beside a trained model: what it guarantees, what it was trained on, how to check it."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Mapping
from typing import Any

from dpcore.errors import ArgumentTypeError
from dpcore.statement.statement import Statement
from dpcore.statement.text import format_delta, format_epsilon, format_lower, format_number, paragraphs, visible

_METADATA = """---
library_name: dpcore
tags:
- differential-privacy
---
"""


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
        Public facts about model and data ("parameters": 7,850), one row each. What stands here is published.
    files : mapping of str to bytes, optional
        Files beside the card; each is listed with its SHA-256.
    """
    lines = [_METADATA, f"# {_one_line(title)}", "", "## Privacy", ""]
    for paragraph in paragraphs(statement):
        lines += [*textwrap.wrap(_escaped(paragraph), 100, break_on_hyphens=False), ""]
    lines += [*_table(_privacy(statement)), "", "## What was trained", ""]
    lines += [*_table(_facts(statement) | _checked(trained or {})), "", "## How to check it", ""]
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
    if files:
        lines += ["", "## Files", "", "| file | SHA-256 |", "| --- | --- |"]
        lines += [f"| `{name}` | `{hashlib.sha256(content).hexdigest()}` |" for name, content in files.items()]
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


def _checked(trained: Mapping[str, Any]) -> dict[str, str]:
    for name, value in trained.items():
        if not isinstance(value, (str, int, float)):
            raise ArgumentTypeError(f"trained[{name!r}]={type(value).__name__}: must be text or a number")
    return {
        name: format_number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        for name, value in trained.items()
    }


def _table(rows: Mapping[str, str]) -> list[str]:
    return ["| | |", "| --- | --- |", *(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())]


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def _one_line(text: str) -> str:
    return " ".join(str(text).split())


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*")
