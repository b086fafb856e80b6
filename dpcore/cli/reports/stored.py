"""Finding the statements in a run folder or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpcore.errors import DataError
from dpcore.spec.canonical import read_json_file


def stored(path: Path) -> dict[str, dict[str, Any]]:
    """Return the statements under `path` by name, as plain content; the name of a single one is "".

    Parameters
    ----------
    path : Path
        A statement.json, or a folder that holds one: a run, an export, a comparison or a demonstration.

    Raises
    ------
    DataError
        Where there is none, or the file is not JSON, or names something twice.
    """
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
    found = _statements(content)
    if not found:
        raise DataError(f"{path}: holds no privacy statement")
    return found


def _hint(path: Path) -> str:
    with path.open("rb") as file:
        if file.read(15) == b"SQLite format 3":
            return ": if it is a ledger, dpcore ledger show and dpcore ledger verify read it"
    return "; the JSON beside it is meant" if path.suffix == ".txt" else ""


def _statements(content: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(content, dict):
        return {}
    if "settings_hash" in content:
        return {"": content}
    inner = content.get("each_run", content)
    if not isinstance(inner, dict):
        return {}
    return {str(k): v for k, v in inner.items() if isinstance(v, dict) and "settings_hash" in v}
