"""Results go to standard output; progress and remarks to standard error, so that a pipe carries results only."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console


def write_line(text: str = "") -> None:
    """Write one line of a result."""
    sys.stdout.write(text + "\n")


def write_json(content: Any) -> None:
    """Write one JSON object, numbers in full."""
    sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


def remarks() -> Console:
    """Return a console on standard error, made now: tests and pipes may have replaced the stream since import."""
    return Console(stderr=True, highlight=False, soft_wrap=True)
