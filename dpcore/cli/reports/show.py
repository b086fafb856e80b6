"""``dpcore methods`` and ``dpcore statement``: the methods with their papers, and what a run says about its privacy."""

from __future__ import annotations

import inspect
import shutil
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer

from dpcore.cli.options import Json, count, flag, option
from dpcore.cli.output import write_json, write_line
from dpcore.cli.stored import as_statement, stored
from dpcore.errors import ArgumentError
from dpcore.methods import METHODS, PAPERS
from dpcore.statement.text import visible

_WIDTH, _INDENT = 80, "  "


def methods(as_json: Json = False) -> None:
    """List the methods, each with the paper that it comes from."""
    said = {name: (inspect.getdoc(make) or name).splitlines()[0].replace("`", "") for name, make in METHODS.items()}
    if as_json:
        papers = {name: [{**asdict(paper), "url": paper.url} for paper in PAPERS[name]] for name in METHODS}
        write_json({name: {"summary": said[name], "papers": papers[name]} for name in METHODS})
        return
    for name, sentence in said.items():
        write_line(name)
        for text in (sentence, *(paper.text() for paper in PAPERS[name])):
            for line in wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False):
                write_line(line)


_NARROWEST, _WIDEST = 40, 1000


def statement(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run folder, an export, or a statement.json.")],
    width: Annotated[int | None, option(count, "N", "Characters a line; the terminal's, at most 100.")] = None,
    full: Annotated[bool, flag("--full", "All settings, events and assumptions, not a summary in ten lines.")] = False,
    as_json: Json = False,
) -> None:
    """Print a stored privacy statement in short. dpcore verify checks it."""
    if width is not None and not _NARROWEST <= width <= _WIDEST:
        raise ArgumentError(f"width={width!r}: must lie between {_NARROWEST} and {_WIDEST}")
    found = {name: as_statement(path, content) for name, (_, content) in stored(path).items()}
    if as_json:
        contents = {name: item.to_dict() for name, item in found.items()}
        write_json(contents.get("", contents))
        return
    columns = min(100, shutil.get_terminal_size().columns) if width is None else width
    for name, item in found.items():
        if name:
            write_line(f"{visible(name)}\n")
        write_line(item.summary(max(columns, _NARROWEST), full=full))
