"""How the tests of the command line run a command. They need what it may need: machines without it skip them."""

import contextlib
import io
import json
from collections.abc import Sequence
from typing import Any

import pytest

for _name in ("typer", "rich", "torch", "matplotlib"):
    pytest.importorskip(_name)
from dpcore.cli import main  # noqa: E402


def say(capsys: Any, words: Sequence[str], status: int = 0) -> Any:
    """Run a command, which ends with this status; return what it printed: `out` and `err`.

    Without the line that says that it still computes, which a slow machine adds (tests/unit/cli/test_output.py).
    """
    assert main(words) == status
    told = capsys.readouterr()
    kept = [line for line in told.err.splitlines(keepends=True) if not line.startswith("remark: still computing: ")]
    return told._replace(err="".join(kept))


def ask(*words: object, status: int = 0) -> dict[str, Any]:
    """Run a command that answers in JSON; return the answer."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*map(str, words), "--json"]) == status
    return dict(json.loads(out.getvalue()))
