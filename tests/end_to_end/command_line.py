"""How the tests of the command line run a command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dpcore.cli import main

pytest.importorskip("typer")
pytest.importorskip("rich")


def say(capsys: Any, words: Sequence[str], status: int = 0) -> Any:
    """Run a command, which ends with this status; return what it printed: `out` and `err`.

    Without the line that says that it still computes, which a slow machine adds (tests/unit/cli/test_waiting.py).
    """
    assert main(words) == status
    told = capsys.readouterr()
    kept = [line for line in told.err.splitlines(keepends=True) if not line.startswith("remark: still computing: ")]
    return told._replace(err="".join(kept))
