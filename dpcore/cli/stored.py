"""The statements in a run folder or a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpcore.errors import DataError
from dpcore.spec.canonical import read_json_file
from dpcore.statement.statement import Statement


def stored(path: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return the statements under `path` by name, as plain content, each with its folder; a single one's name is "".

    `path` is a statement.json, or a folder with one: a run, an export, or a comparison, whose statement.json names the
    folder of one run for each row of its table.
    """
    where, content = _read(path)
    folders = content.get("run_folders")
    named, statements = folders if isinstance(folders, dict) else {"": where.name}, {}
    for name, folder in named.items():
        run = where.parent / str(folder)
        if named is folders and not run.resolve().is_relative_to(where.parent.resolve()):
            raise DataError(f"{where}: names a run outside of its folder, {run}")
        place, content = _read(run)
        if "settings_hash" not in content:
            raise DataError(f"{place}: has no privacy statement")
        statements[str(name)] = (place.parent, content)
    if not statements:
        raise DataError(f"{where}: names no run")
    return statements


def single_statement(path: Path) -> Statement:
    """Return the one statement under `path`, as written; refuse a comparison, which has several."""
    statements = stored(path)
    if "" not in statements:
        raise DataError(f"{path}: has the statements of {len(statements)} runs; name one of its run folders")
    return as_statement(path, statements[""][1])


def as_statement(path: Path, content: Mapping[str, Any]) -> Statement:
    """Return the statement of plain content that was found under `path`."""
    try:
        return Statement.from_dict(content)
    except DataError as cause:
        more = "; dpcore verify says more" if "hash" in str(cause) else ""
        raise DataError(f"{path}: {cause}{more}") from cause


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path's JSON file and its object."""
    if path.is_dir():
        if not (path / "statement.json").is_file():
            raise DataError(f"{path}: is a folder without a statement.json; name a run folder or a statement's file")
        path /= "statement.json"
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    try:
        content = read_json_file(path)
    except ValueError as cause:
        raise DataError(f"{path}: is not JSON{_hint(path) or f' ({cause})'}") from cause
    return path, content if isinstance(content, dict) else {}


def _hint(path: Path) -> str:
    with path.open("rb") as file:
        if file.read(15) == b"SQLite format 3":
            return ": if it is a ledger, dpcore ledger show and dpcore ledger verify read it"
    return "; name the JSON file next to it" if path.suffix == ".txt" else ""
