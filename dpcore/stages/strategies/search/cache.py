"""Solved problems on disk: one file each, named by what was asked and by the version of the search."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

VERSION: Final = 2
"""Of the searches: a file of another version is another problem's."""


def folder() -> Path:
    """Return where solved problems lie: ``DPCORE_CACHE_DIR``, or the user's cache folder."""
    base = os.environ.get("DPCORE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dpcore" / "strategies"


def load(problem: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what was found for a problem; None where nothing is known, or the file is damaged."""
    path = _path(problem)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None
    arrays = {name: value for name, value in found.items() if value.dtype.kind in "fb" and np.isfinite(value).all()}
    return arrays if arrays.keys() == found.keys() and {"bound", "seconds", "finished"} <= arrays.keys() else None


def save(problem: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Keep what was found; where that cannot be written, it is found again next time."""
    path, draft = _path(problem), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".draft", delete=False) as file:
            draft = Path(file.name)
            np.savez(file, allow_pickle=False, **{name: np.asarray(value) for name, value in found.items()})
        draft.replace(path)
    except OSError:
        if draft is not None:
            draft.unlink(missing_ok=True)


def _path(problem: Mapping[str, Any]) -> Path:
    text = json.dumps({"version": VERSION, **problem}, sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.npz"
