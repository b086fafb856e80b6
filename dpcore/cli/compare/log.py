"""results.json of a comparison: every run, written before it begins and again when it ends.

A run that was begun and never ended counts as spent in full. Durations are kept apart, in timing.json: how long a run
takes tells the sizes of its batches, which are secret under Poisson sampling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpcore.accounting import Event
from dpcore.cli.compare.comparison import Comparison, Run
from dpcore.cli.train.run_folder import COMPARISON, RunFolder, locked
from dpcore.errors import DataError
from dpcore.spec.canonical import plain, read_json_file
from dpcore.statement.statement import Statement

COMPLETE, BEGUN, STOPPED, LOST = "complete", "begun", "stopped", "lost"
TIMING_NOTE = (
    "Not covered by the guarantee: how long a run takes tells the sizes of its batches, which are secret under Poisson "
    "sampling. On private data, do not publish this file."
)


class Log:
    """The runs of a comparison, on disk at every moment.

    Parameters
    ----------
    folder : RunFolder
    records : list of dict
        Of an earlier call of the same command; runs that it left open are marked as lost.
    seconds : dict
        Of the same.
    """

    def __init__(self, folder: RunFolder, records: list[dict[str, Any]], seconds: dict[str, float]) -> None:
        self.folder, self.records, self.seconds = folder, records, seconds
        self.summary: dict[str, Any] | None = None
        for record in records:
            if record["status"] == BEGUN:
                record["status"] = LOST

    @classmethod
    def open(cls, path: Path, comparison: Comparison, versions: Mapping[str, str], *, overwrite: bool) -> Log:
        """Begin a comparison in a folder, or take up the same one that is there.

        Raises
        ------
        DataError
            Where the folder holds something else, or a comparison with other settings, or is in use.
        """
        settings = json.loads(json.dumps(plain(comparison.to_dict())))
        if (path / "config.json").is_file():
            with locked(path):
                pass
        held = None if overwrite else _held(path)
        if held is None:
            folder = RunFolder(path, overwrite=overwrite, kind=COMPARISON)
            folder.write_config(settings, dict(versions))
            log = cls(folder, [], {})
            log.write()
            return log
        difference = _difference(held[0], settings)
        if difference:
            raise DataError(
                f"out={str(path)!r}: holds a comparison with other settings ({difference}); name another folder, or "
                "add --overwrite to begin anew"
            )
        return cls(RunFolder.existing(path, COMPARISON), *held[1:])

    def begin(self, run: Run, event: Event) -> int:
        """Write down a run as spent in full, before it begins; return its number."""
        self.records.append({**run._asdict(), "status": BEGUN, "event": event.to_dict()})
        self.write()
        return len(self.records) - 1

    def end(self, number: int, result: Mapping[str, Any]) -> None:
        """Write down what a run gave and spent.

        Parameters
        ----------
        number : int
            As `begin` returned it.
        result : mapping
            As `dpcore.cli.compare.worker.train_once` returns it.
        """
        record = self.records[number]
        self.seconds[str(number)] = round(result["seconds"], 3)
        record.update({key: value for key, value in result.items() if key != "seconds"})
        self.write()

    def complete(self) -> dict[Run, dict[str, Any]]:
        """Return the complete runs."""
        return {_run(record): record for record in self.records if record["status"] == COMPLETE}

    def seconds_of(self, run: Run) -> float | None:
        """Return how long a complete run took."""
        for number, record in enumerate(self.records):
            if record["status"] == COMPLETE and _run(record) == run:
                return self.seconds.get(str(number))
        return None

    def events(self) -> list[Event]:
        """Return what every run released or may have released, those that were stopped or lost too."""
        return [Event.from_dict(record["event"]) for record in self.records]

    def statement(self, run: Run) -> Statement:
        """Return the statement of a complete run."""
        return Statement.from_dict(self.complete()[run]["statement"])

    def write(self) -> None:
        """Put both files in place."""
        self.folder.write_json("timing.json", {"note": TIMING_NOTE, "seconds": self.seconds})
        self.folder.write_json("results.json", {"format": 1, "summary": self.summary, "runs": self.records})


def _run(record: Mapping[str, Any]) -> Run:
    return Run(*(record[name] for name in Run._fields))


def _held(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, float]] | None:
    """Return settings, records and durations of the comparison in a folder; None where there is none."""
    if not (path / "config.json").is_file():
        return None
    try:
        config = read_json_file(path / "config.json")
        if not isinstance(config, dict) or config.get("kind") != COMPARISON:
            return None
        if not (path / "results.json").exists():
            return config["settings"], [], {}
        records = read_json_file(path / "results.json")["runs"]
        timing = path / "timing.json"
        seconds = read_json_file(timing)["seconds"] if timing.exists() else {}
        return config["settings"], records, seconds
    except (ValueError, KeyError, TypeError) as cause:
        raise DataError(
            f"out={str(path)!r}: its files cannot be read ({cause}); add --overwrite to begin anew"
        ) from cause


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
