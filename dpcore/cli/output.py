"""Results go to standard output; progress and remarks to standard error, so that a pipe carries results only."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from dpcore.spec import waiting
from dpcore.spec.canonical import plain

if TYPE_CHECKING:
    from rich.console import Console


# The width if nothing else gives one: rich would use 80 and break most rows of a table.
_WIDTH, _NARROWEST = 110, 80
# Together with the start, 0.3 to 0.4 seconds, this is within a second of the call.
_PATIENCE = 0.5


def write_line(text: str = "") -> None:
    """Write one line of a result; on a terminal, broken between words to its width."""
    sys.stdout.write(fitted(text, sys.stdout) + "\n")


def fitted(text: str, stream: TextIO) -> str:
    """Return a text broken between words to a terminal's width, and unchanged if the stream is no terminal.

    If it begins with a name and a gap, further lines are indented to the end of the gap.
    """
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    name = re.match(r"\S.*?  +", text)
    indent = " " * (len(name[0]) if name and len(name[0]) <= width // 2 else 0)
    lines = (textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False)
        or [""] for line in text.split("\n"))  # fmt: skip
    return "\n".join(part for wrapped in lines for part in wrapped)


@contextmanager
def remarked_warnings() -> Iterator[None]:
    """Write Python's warnings as remarks, without the line of code, which does not help a user."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        sys.stderr.write(fitted(f"remark: {message}", sys.stderr) + "\n")

    with warnings.catch_warnings():  # which puts both back
        warnings.showwarning = show
        yield


@contextmanager
def told_if_slow(words: str) -> Iterator[None]:
    """Write one line on standard error if the block takes longer than half a second: what it computes.

    Nobody should have to guess whether a command still does anything. It decorates functions, too.
    """
    stream = sys.stderr

    def text() -> str:
        return fitted(f"remark: still computing: {words}; Ctrl-C stops it", stream)

    with waiting.told_if_slow(text, _PATIENCE):
        yield


def write_json(content: Any) -> None:
    """Write one JSON object, numbers in full; an infinite one is "inf"."""
    sys.stdout.write(json.dumps(plain(content), indent=2, allow_nan=False) + "\n")


def write_answer(as_json: bool, content: Any, *lines: str) -> None:
    """Write a command's result: one JSON object for a program, or lines for a person."""
    if as_json:
        write_json(content)
        return
    for line in lines:
        write_line(line)


def known(value: float) -> float | None:
    """Return a number for a report: None if it is not finite."""
    return value if math.isfinite(value) else None


def remarks() -> Console:
    """Return a console on standard error, made now: tests and pipes may have replaced the stream since import."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def remark(sentence: str | None) -> None:
    """Write a remark on standard error, if there is one."""
    if sentence is not None:
        from rich.markup import escape

        remarks().print(f"[yellow]remark:[/] {escape(sentence)}")


def write_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    right: int = 0,
    wraps: int | None = None,
    file: TextIO | None = None,
) -> None:
    """Write a table as a result; the last `right` columns are aligned at the right, and the one at `wraps` may break.

    Nothing is cut off, since the end of a long word may be the figure: on a narrow terminal lines are broken.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", show_header=any(head), box=None, pad_edge=False)
    for index, name in enumerate(head):
        side: Any = "right" if index >= len(head) - right else "left"
        table.add_column(name, style="" if index else "bold", justify=side, no_wrap=index != wraps, overflow="fold")
    for row in rows:
        table.add_row(*row)
    stream = file or sys.stdout
    console = Console(file=stream, highlight=False)
    console.width = max(console.width if console.is_terminal else _WIDTH, _NARROWEST)
    with console.capture() as printed:
        console.print(table)
    stream.write("".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()))
