"""The Sphinx extension of this site: fills pages with what is generated from the code while they are read.

A line ``<!-- generated: WORDS -->`` in a page is replaced by what GENERATORS has under the first word, called with the
others. Nothing generated is committed; pages of single objects are written below docs/api, which git ignores.
"""

from __future__ import annotations

import re
from typing import Any

import api_pages
import benchmark_pages
import command_reference
import error_reference
import inventories
import recipe_table

GENERATORS = {
    "objects": api_pages.table,
    "commands": command_reference.markdown,
    "errors": error_reference.markdown,
    "warnings": error_reference.warnings,
    "exit-codes": error_reference.exit_codes,
    "recipes": recipe_table.markdown,
    "peers": benchmark_pages.peers,
    "asv": benchmark_pages.asv_history,
    "command-line": benchmark_pages.command_line,
}
MARKER = re.compile(r"^<!-- generated: ([\w-]+) ?(.*?) -->$", flags=re.MULTILINE)


def filled(text: str) -> str:
    """Replace every marker; an unknown one is a KeyError, which ends the build."""
    return MARKER.sub(lambda found: GENERATORS[found[1]](*found[2].split()), text)


def fill(_app: Any, _name: str, content: list[str]) -> None:
    content[0] = filled(content[0])


def always_read(_app: Any, env: Any, *_changes: set[str]) -> list[str]:
    """The pages with markers change with the code, not with their files."""
    pages = (name for name in env.found_docs if str(env.doc2path(name)).endswith(".md"))
    return [name for name in pages if MARKER.search(env.doc2path(name).read_text())]


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", api_pages.write)
    app.connect("config-inited", inventories.write, priority=100)  # before intersphinx reads its settings
    app.connect("source-read", fill)
    app.connect("env-get-outdated", always_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
