"""How the tests of the command line run a command. They need what it may need: machines without it skip them."""

import io
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

for _name in ("typer", "rich", "torch", "matplotlib"):
    pytest.importorskip(_name)
import torch  # noqa: E402

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
    with redirect_stdout(out):
        assert main([*map(str, words), "--json"]) == status
    return dict(json.loads(out.getvalue()))


def forked(words: Sequence[str], out: Path, err: Path, before: Callable[[], None] = lambda: None) -> Any:
    """Begin a command in a fork, which need not import torch, and calls `before` first; its words go to files."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others do not survive a fork
    child = multiprocessing.get_context("fork").Process(target=_told, args=(words, out, err, before))
    child.start()
    torch.set_num_threads(threads)
    return child


def _told(words: Sequence[str], out: Path, err: Path, before: Callable[[], None]) -> None:
    before()
    with out.open("a") as told, err.open("a") as wrong, redirect_stdout(told), redirect_stderr(wrong):
        status = main(words)
    sys.exit(status)
