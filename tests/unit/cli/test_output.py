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
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.text("ab \n", max_size=40), st.lists(st.integers(0, 40), max_size=4))
def test_no_line_ends_with_blanks_in_whatever_pieces_it_is_written(text: str, cuts: list[int]):
    stream = io.StringIO()
    former, sys.stdout = sys.stdout, stream
    try:
        with output.trimmed_output():
            for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
                sys.stdout.write(text[first:last])
    finally:
        sys.stdout = former
    *lines, rest = text.split("\n")
    assert stream.getvalue() == "".join(f"{line.rstrip(' ')}\n" for line in lines) + rest


def test_a_warning_is_a_remark_without_its_line_of_code(capsys):
    former = warnings.showwarning
    with output.remarked_warnings(), warnings.catch_warnings():
        warnings.simplefilter("always")
        output.warnings.warn("slow", stacklevel=1)
    assert capsys.readouterr().err == "remark: slow\n"
    assert warnings.showwarning is former


@pytest.mark.parametrize("words", ["--help", "train --help", "inspect filter momentum", "inspect filter --help"])
def test_commands_in_a_pipe_write_no_trailing_blanks(words: str):
    done = subprocess.run(
        [sys.executable, "-m", "dpcore", *words.split()], env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(done.stdout.splitlines()) > 5
    assert not [line for line in done.stdout.splitlines() if line != line.rstrip()]
    assert "<bool>" not in done.stdout
