"""Tables on standard output, legible in a pipe too."""

from __future__ import annotations

import sys

from rich.console import Console

# Where nothing tells a width: rich would take 80 and break most rows of a table.
_WIDTH = 110


def results() -> Console:
    """Return a console on standard output, made now: tests and pipes may have replaced the stream since import."""
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console
