"""Results go to standard output; progress and remarks to standard error, so that a pipe carries results only."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


# Where nothing tells a width: rich would take 80 and break most rows of a table.
_WIDTH = 110


def write_line(text: str = "") -> None:
    """Write one line of a result."""
    sys.stdout.write(text + "\n")


@contextmanager
def remarked_warnings() -> Iterator[None]:
    """Write what Python warns of as a remark, without the line of code, which says nothing to a user."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        sys.stderr.write(f"remark: {message}\n")

    former = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = former


def write_json(content: Any) -> None:
    """Write one JSON object, numbers in full."""
    sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


def known(value: float) -> float | None:
    """Return a number as a report has it: None where it is not finite."""
    return value if math.isfinite(value) else None


def remarks() -> Console:
    """Return a console on standard error, made now: tests and pipes may have replaced the stream since import."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def results() -> Console:
    """Return a console on standard output, likewise, for tables that are legible in a pipe too."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console
