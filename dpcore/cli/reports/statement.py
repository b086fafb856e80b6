"""``dpcore statement``: what a run says about its privacy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from dpcore.cli.options import Json, flag, option
from dpcore.cli.output import write_json, write_line
from dpcore.cli.stored import stored
from dpcore.cli.values import count
from dpcore.errors import ArgumentError, DataError
from dpcore.statement.statement import Statement
from dpcore.statement.text import visible

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
    found = {name: _read(content, path) for name, (_, content) in stored(path).items()}
    if as_json:
        contents = {name: item.to_dict() for name, item in found.items()}
        write_json(contents.get("", contents))
        return
    columns = min(100, shutil.get_terminal_size().columns) if width is None else width
    for name, item in found.items():
        if name:
            write_line(f"{visible(name)}\n")
        write_line(item.summary(max(columns, _NARROWEST), full=full))


def _read(content: dict[str, object], path: Path) -> Statement:
    try:
        return Statement.from_dict(content)
    except DataError as cause:
        more = "; dpcore verify says more" if "hash" in str(cause) else ""
        raise DataError(f"{path}: {cause}{more}") from cause
