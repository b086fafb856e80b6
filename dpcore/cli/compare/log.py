"""The runs of a comparison, on disk at every moment: results.json lists them, and each has a folder as of `train`.

What a run spent is what its own folder states, which at every moment is all that it released, or more. Durations are
apart, in timing.json: how long a run takes tells the sizes of its batches, which are secret under Poisson sampling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpcore.accounting import Event
from dpcore.cli.compare.comparison import Comparison, Run
from dpcore.cli.train.run_folder import (
    COMPARISON,
    RUNS,
    RunFolder,
    check_folder,
    checkpoint_of,
    holds,
    locked,
    read_run,
)
from dpcore.errors import DataError
from dpcore.spec.canonical import plain, read_json_file
from dpcore.statement.statement import Statement

COMPLETE, STOPPED, UNDER_WAY, NOTHING = "complete", "stopped", "under way", "ended before its first step"
TIMING_NOTE = (
    "Not covered by the guarantee: how long a run takes tells the sizes of its batches, which are secret under Poisson "
    "sampling. On private data, do not publish this file."
)


class Record:
    """One run that was begun, and what its folder says of it; `seconds` is how long it took."""

    def __init__(self, run: Run, path: Path, seconds: float | None = None) -> None:
        self.run, self.path, self.seconds = run, path, seconds
        self.ended = False
        self.statement: Statement | None = None
        self.evaluations: list[dict[str, Any]] = []

    def read(self) -> None:
        """Read the folder of a run that has ended, in good order or not."""
        self.statement, self.evaluations = read_run(self.path)
        self.ended = True

    @property
    def status(self) -> str:
        """`COMPLETE`, `STOPPED` early or killed, `UNDER_WAY`, or `NOTHING` where no step was taken."""
        stated = self.statement
        if stated is None:
            return NOTHING if self.ended else UNDER_WAY
        # While a run is under way its statement has a note.
        return COMPLETE if stated.steps_taken == stated.steps_planned and not stated.note else STOPPED

    @property
    def accuracy(self) -> list[float]:
        """Held-out accuracy at each evaluation."""
        return [item["test_accuracy"] for item in self.evaluations]


class Log:
    """The runs of a comparison, with those of an earlier call of the same command."""

    def __init__(self, folder: RunFolder, comparison: Comparison, records: list[Record]) -> None:
        self.folder, self.comparison, self.records = folder, comparison, records
        self.summary: dict[str, Any] | None = None

    @classmethod
    def open(cls, path: Path, comparison: Comparison, ledger: Path | None, *, overwrite: bool) -> Log:
        """Begin a comparison in a folder, or take up the one with the same settings that is there; else DataError."""
        records = earlier(path, comparison, ledger, overwrite=overwrite)
        if records is not None:
            return cls(RunFolder(path, kind=COMPARISON, existing=True), comparison, records)
        folder = RunFolder(path, overwrite=overwrite, kind=COMPARISON)
        folder.write_config(_settings(comparison), ledger)
        log = cls(folder, comparison, [])
        log.write()
        return log

    def begin(self, run: Run) -> Record:
        """Write down that a run begins, and where."""
        name = re.sub("[^a-z0-9]+", "-", run.contestant.lower()).strip("-")
        number, parent = len(self.records) + 1, self.folder.path / RUNS
        while (path := parent / f"{number:03d}-{name}").exists() or checkpoint_of(path).exists():
            number += 1
        self.records.append(Record(run, path))
        self.write()
        return self.records[-1]

    def end(self, record: Record, seconds: float) -> None:
        """Write down that a run has ended."""
        record.seconds = round(seconds, 3)
        record.read()
        self.write()

    def complete(self) -> dict[Run, Record]:
        """Return the complete runs."""
        return {record.run: record for record in self.records if record.status == COMPLETE}

    def accuracies(self) -> dict[Run, float]:
        """Return held-out accuracy at the end of each complete run."""
        return {run: record.accuracy[-1] for run, record in self.complete().items()}

    def due(self) -> list[Run]:
        """Return the runs that may begin now."""
        return self.comparison.due(self.accuracies())

    def events(self) -> list[Event]:
        """Return what every run released or may have released, those that were stopped or killed too."""
        return [Event.from_dict(record.statement.event) for record in self.records if record.statement is not None]

    def write(self) -> None:
        """Put both files in place."""
        base = self.folder.path
        seconds = {str(record.path.relative_to(base)): record.seconds for record in self.records if record.seconds}
        self.folder.write_json("timing.json", {"note": TIMING_NOTE, "seconds": seconds})
        runs = [
            {**record.run._asdict(), "folder": str(record.path.relative_to(base)), "status": record.status}
            for record in self.records
        ]
        self.folder.write_json("results.json", {"format": 2, "summary": self.summary, "runs": runs})


def earlier(path: Path, comparison: Comparison, ledger: Path | None, *, overwrite: bool) -> list[Record] | None:
    """Return the runs of the comparison with the same settings in a folder; None where a new one may begin.

    DataError where neither can be; nothing is made and nothing is deleted.
    """
    if (path / "config.json").is_file():
        with locked(path):
            pass
    if overwrite or not holds(path, COMPARISON):
        check_folder(path, overwrite=overwrite, kind=COMPARISON)
        return None
    held, records = _held(path)
    paid = held.pop("ledger", None)
    if paid is not None and ledger is None:
        raise DataError(
            f"ledger=None: the runs in {path} are paid for by the ledger {paid}; add --ledger {paid}, or name another "
            "folder"
        )
    difference = _difference(held, _settings(comparison))
    if difference:
        raise DataError(
            f"out={str(path)!r}: holds a comparison with other settings ({difference}); name another folder, or "
            "add --overwrite to begin anew"
        )
    return records


def _settings(comparison: Comparison) -> dict[str, Any]:
    return dict(json.loads(json.dumps(plain(comparison.to_dict()))))


def _held(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Return the settings and the runs of the comparison in a folder."""
    try:
        settings = read_json_file(path / "config.json")["settings"]
        if not (path / "results.json").exists():
            return settings, []
        listed = read_json_file(path / "results.json")["runs"]
        timing = path / "timing.json"
        seconds = read_json_file(timing)["seconds"] if timing.exists() else {}
        records = []
        for item in listed:
            run = Run(*(item[name] for name in Run._fields))
            records.append(Record(run, path / item["folder"], seconds.get(item["folder"])))
            records[-1].read()
            if item["status"] in (COMPLETE, STOPPED) and records[-1].statement is None:
                raise DataError(
                    f"out={str(path)!r}: the statement of its run {item['folder']} is gone, so that nothing says what "
                    "it spent; put the folder back, or add --overwrite to begin anew"
                )
    except (ValueError, KeyError, TypeError) as cause:
        raise DataError(
            f"out={str(path)!r}: its files cannot be read ({cause}); add --overwrite to begin anew"
        ) from cause
    return settings, records


def _difference(held: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Name the first setting that differs; empty where all are equal."""
    for key in {**held, **asked}:
        before, now = held.get(key), asked.get(key)
        if before == now:
            if isinstance(now, dict) and list(before or {}) != list(now):
                return f"{key} stand in another order"
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            return f"{key}: {_difference(before, now)}"
        return f"{key}: {json.dumps(before)} there, {json.dumps(now)} here"
    return ""
