"""Finding the statements in a run folder or a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpcore.errors import DataError

# A statement is some ten thousand characters; a large comparison has hundreds of them.
_MOST_BYTES = 100_000_000


def stored(path: Path) -> dict[str, dict[str, Any]]:
    """Return the statements under `path` by name, as plain content; the name of a single one is "".

    Parameters
    ----------
    path : Path
        A statement.json, or a folder that holds one: a run, an export, or a comparison, whose statement.json names
        the folder of one run for each row of its table.

    Raises
    ------
    DataError
        Where there is none, or the file is not JSON, or names something twice.
    """
    where, content = _read(path)
    folders = content.get("run_folders")
    if not isinstance(folders, dict):
        return {"": _single(where, content)}
    found = {}
    for name, folder in folders.items():
        run = where.parent / str(folder)
        if not run.resolve().is_relative_to(where.parent.resolve()):
            raise DataError(f"{where}: names a run outside of its folder, {run}")
        found[str(name)] = _single(*_read(run))
    if not found:
        raise DataError(f"{where}: names no run")
    return found


def _single(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    if "settings_hash" not in content:
        raise DataError(f"{path}: holds no privacy statement")
    return content


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file that is meant, and its JSON object."""
    if path.is_dir():
        if not (path / "statement.json").is_file():
            raise DataError(f"{path}: is a folder without a statement.json; name a run folder or a statement's file")
        path /= "statement.json"
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if path.stat().st_size > _MOST_BYTES:
        raise DataError(f"{path}: is too large for a statement")
    try:
        # Editors on some systems put a byte order mark in front.
        content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_once)
    except DataError as cause:
        raise DataError(f"{path}: {cause}") from cause
    except (ValueError, RecursionError) as cause:
        raise DataError(f"{path}: is not JSON{_hint(path)}") from cause
    return path, content if isinstance(content, dict) else {}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; a name that stands there twice would read one way to a person and another way to a check."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(
            f"{twice!r} stands twice in one of its objects, so that a reader and a check may see different ones"
        )
    return content


def _hint(path: Path) -> str:
    with path.open("rb") as file:
        if file.read(15) == b"SQLite format 3":
            return ": if it is a ledger, dpcore ledger show and dpcore ledger verify read it"
    return "; the JSON beside it is meant" if path.suffix == ".txt" else ""
