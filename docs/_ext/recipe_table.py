"""The matrix of the papers: every algorithm, theorem, table and figure, where it is in dpcore or why it is not."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from dpcore.cli.compare import recipe
from dpcore.methods import PAPERS

ITEMS = Path(__file__).parents[1] / "papers.toml"


def markdown() -> str:
    """One table a paper: a row an item of papers.toml, then a row a recipe."""
    found = [recipe.find(name) for name in recipe.names()]
    lines: list[str] = []
    for paper, items in tomllib.loads(ITEMS.read_text()).items():
        title = PAPERS[paper][0].title
        lines += [f"## {title}", "", "| place | what | in dpcore | |", "| --- | --- | --- | --- |"]
        lines += [_row(place, item) for place, item in items.items()]
        for one in found:
            if PAPERS[one.paper][0].title == title:
                how = "runs" if one.arms else f"`{one.how}`" if one.study else one.reason
                lines.append(f"| {one.place} | {one.title} | `{one.name}` | {how} |")
        lines.append("")
    return "\n".join(lines)


def _row(place: str, item: dict[str, Any]) -> str:
    names = ", ".join(f"`{name}`" for name in item["where"]) or "-"
    return f"| {place} | {item['what'].replace('|', chr(92) + '|')} | {names} | {item.get('note', '')} |"
