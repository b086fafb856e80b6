"""The run folder: readable at every moment, public in every file.

Files are written under another name and moved to their place in one step: a reader, or a run killed at any moment, sees
the old file or the new one. This module never gets anything secret: no key, no index, no realized batch size, no
training loss, and no duration of a step (which reveals the size of its batch). A checkpoint is secret, and is next to
the folder.
"""

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from dpcore.errors import DataError
from dpcore.spec import lock
from dpcore.spec.canonical import plain, read_json_file
from dpcore.spec.whole_file import whole_file
from dpcore.statement.statement import Statement

RUN = "dpcore run"
COMPARISON = "dpcore compare"
SELECTION = "dpcore tune"
"""Of a folder that waits for the winner of a selection, whose run it then has."""
# The folder of a comparison's runs.
RUNS = "runs"
# The only names that this module creates, and so the only ones that it deletes. Earlier versions wrote timing.json,
# table.txt and learning-curve.png.
NAMES = ("config.json", "metrics.jsonl", "statement.json", "statement.txt", "learning-curve.png", "comparison.png",
    "results.json", "timing.json", "table.txt", "model.safetensors", "gradients.npz", "README.md")  # fmt: skip


class RunFolder:
    """One folder for one run. It is created if necessary, or used as it is if `existing`.

    With `overwrite` the files of an earlier run, and its checkpoint, are deleted first; other files are never touched.
    A folder of another `kind` (`RUN` or `COMPARISON`, the mark in config.json) is never overwritten, nor one in use by
    another command. `stated` is the last statement that was written there.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, kind: str = RUN, existing: bool = False) -> None:
        self.path, self.kind = path, kind
        self.stated: Statement | None = None
        if existing:
            return
        check_folder(path, overwrite=overwrite, kind=kind)
        if holds(path, kind):
            with locked(path):
                _clear(path, kind)
        path.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint(self) -> Path:
        """Where a run that can be resumed keeps its checkpoint."""
        return checkpoint_of(self.path)

    def write_config(self, settings: dict[str, Any], ledger: Path | None, versions: Any = None) -> None:
        """Write config.json, the first of all files, by which a folder is recognized.

        The ledger is among the settings: otherwise a repetition by ``--config`` would release without paying.
        """
        software = {} if versions is None else {"software": versions}
        repeated = {**settings, "ledger": None if ledger is None else str(ledger)}
        self.write_json("config.json", {"kind": self.kind, "format": 1, "settings": repeated, **software})

    def write_statement(self, statement: Statement) -> None:
        """Write the statement as text and as JSON."""
        self.write("statement.txt", statement.text().encode())
        self.write("statement.json", (statement.to_json() + "\n").encode())
        self.stated = statement

    def write_metrics(self, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Replace metrics.jsonl: one JSON object a line, for each evaluation."""
        self.write("metrics.jsonl", b"".join(map(_line, evaluations)))

    def log(self, evaluation: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl; it is on disk before the next step begins."""
        path, line = self.path / "metrics.jsonl", _line(evaluation)
        # One write of a whole line: killed before it, the file ends with the line before.
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                taken = file.write(line)
            except OSError as cause:
                raise OSError(cause.errno, cause.strerror, str(path)) from cause
            if taken != len(line):  # a disk that is nearly full silently takes a part
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def write_json(self, name: str, content: Any) -> None:
        """Write one JSON file."""
        self.write(name, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())

    def write(self, name: str, content: bytes) -> None:
        """Write one file as a whole: a crash leaves the old content or the new, never a part."""
        if name not in NAMES:
            raise ValueError(f"name={name!r}: must be one of {NAMES}, so that --overwrite finds it again")
        with whole_file(self.path / name) as file:
            file.write(content)


def _line(evaluation: Mapping[str, Any]) -> bytes:
    return (json.dumps(plain(evaluation), allow_nan=False) + "\n").encode()


def check_folder(path: Path, *, overwrite: bool = False, kind: str = RUN) -> None:
    """Refuse a folder that cannot be used. The test leaves nothing behind and deletes nothing."""
    if path.exists() and not path.is_dir():
        raise DataError(f"out={str(path)!r}: is a file; name a folder")
    kept = checkpoint_of(path)
    waiting = kind == RUN and kept.exists()
    if path.exists() and any(path.iterdir()):
        if not holds(path, kind):
            raise DataError(f"out={str(path)!r}: is not empty and has no {kind}; name another folder")
        if not overwrite:
            resume = f"continue it (dpcore train --resume {path}), " if waiting else ""
            raise DataError(f"out={str(path)!r}: already has a run; {resume}name another folder or add --overwrite")
        with locked(path):
            pass
    elif waiting:
        raise DataError(
            f"out={str(path)!r}: the checkpoint of another run, {kept}, is in this one's place; delete it or name "
            "another folder"
        )
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    try:
        Path(mkdtemp(prefix=".dpcore-", dir=there)).rmdir()
    except OSError as cause:
        raise DataError(
            f"out={str(path)!r}: cannot be made (nothing can be made in {there}: {cause.strerror}); name another folder"
        ) from cause


def next_folder(parent: Path, name: str) -> Path:
    """Return ``parent/name``, or ``parent/name-2`` and so on if that exists."""
    number = 1
    while (path := parent / (name if number == 1 else f"{name}-{number}")).exists() or checkpoint_of(path).exists():
        number += 1
    return path


def _clear(path: Path, kind: str) -> None:
    """Delete the files of a run, or of a comparison and its runs, and no others."""
    if kind == RUN:
        checkpoint_of(path).unlink(missing_ok=True)
        shutil.rmtree(path / "tensorboard", ignore_errors=True)  # of earlier versions
    else:
        for run in filter(holds, path.glob(f"{RUNS}/*")):
            _clear(run, RUN)
        for emptied in (*path.glob(f"{RUNS}/*"), path / RUNS):
            if emptied.is_dir() and not any(emptied.iterdir()):
                emptied.rmdir()
    for name in NAMES:
        (path / name).unlink(missing_ok=True)


def read_run(path: Path) -> tuple[Statement | None, list[dict[str, Any]]]:
    """Return the statement and the evaluations in a run's folder; None and no evaluations if no step was taken."""
    try:
        if not (path / "statement.json").exists():
            return None, []
        statement = Statement.from_json((path / "statement.json").read_text("utf-8"))
        return statement, [json.loads(line) for line in (path / "metrics.jsonl").read_text("utf-8").splitlines()]
    except (OSError, ValueError) as cause:
        raise DataError(f"run folder {path}: cannot be read ({cause})") from cause


def checkpoint_of(folder: Path) -> Path:
    """Return the path of a run's checkpoint: next to its folder, whose files are all public."""
    whole = folder.resolve()
    return whole.with_name(f"{whole.name}.checkpoint")


def holds(path: Path, kind: str = RUN) -> bool:
    """Whether a folder has a run or comparison, as `kind` says."""
    return content_of(path / "config.json").get("kind") == kind


def content_of(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if none can be read."""
    try:
        content = read_json_file(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def locked(path: Path) -> AbstractContextManager[None]:
    """Refuse a second command in the same folder while the block runs."""
    return lock.locked(path / "config.json", f"run folder {path}: another command is using it; wait for its end")
