"""Lines fit a terminal, and nothing trails them in a pipe."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
from dpcore.cli import output

LONG = "dpcore: out='runs/digits': already holds a run; name another folder or add --overwrite, and then it is replaced"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _eighty(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_a_terminal_gets_lines_that_it_shows_whole():
    fitted = output.fitted(LONG, Terminal())
    assert max(map(len, fitted.splitlines())) <= 80
    assert " ".join(fitted.split()) == LONG
    assert "--overwrite," in fitted.split()
    assert output.fitted("short", Terminal()) == "short"
    assert output.fitted("", Terminal()) == ""
    assert output.fitted("one\n\ntwo", Terminal()) == "one\n\ntwo"


def test_a_pipe_gets_each_sentence_in_one_line():
    assert output.fitted(LONG, io.StringIO()) == LONG


def test_what_comes_after_a_name_stays_in_its_column():
    line = f"{'so far, however it was chosen':<30} {'epsilon = 2 at delta = 1e-5, add-remove adjacency, by 12 runs'}"
    first, second = output.fitted(line, Terminal()).splitlines()
    assert first.index("epsilon") == len(second) - len(second.lstrip())


def test_a_warning_is_a_remark_without_its_line_of_code(capsys):
    former = warnings.showwarning
    with output.remarked_warnings(), warnings.catch_warnings():
        warnings.simplefilter("always")
        output.warnings.warn("slow", stacklevel=1)
    assert capsys.readouterr().err == "remark: slow\n"
    assert warnings.showwarning is former


@pytest.mark.parametrize("words", ["train --help", "inspect filter", "inspect filter momentum"])
def test_tables_in_a_pipe_have_no_trailing_blanks(words: str):
    done = subprocess.run(
        [sys.executable, "-m", "dpcore", *words.split()], env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(done.stdout.splitlines()) > 5
    assert "--help" in words or not [line for line in done.stdout.splitlines() if line != line.rstrip()]
    assert "<bool>" not in done.stdout
