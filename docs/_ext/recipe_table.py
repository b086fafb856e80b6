"""The table of recipes: every table and figure of the papers that shows a private result, and what makes it again."""

from __future__ import annotations

from dpcore.cli.compare import recipe
from dpcore.methods import PAPERS


def markdown() -> str:
    """One table a paper, a row a recipe."""
    found = [recipe.find(name) for name in recipe.names()]
    lines: list[str] = []
    for title in dict.fromkeys(PAPERS[one.paper][0].title for one in found):
        lines += [f"## {title}", "", "| recipe | where | what | |", "| --- | --- | --- | --- |"]
        for one in found:
            if PAPERS[one.paper][0].title == title:
                how = "runs" if one.arms else f"`{one.how}`" if one.study else one.reason
                lines.append(f"| `{one.name}` | {one.place} | {one.title} | {how} |")
        lines.append("")
    return "\n".join(lines)
