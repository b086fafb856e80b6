"""Tables of what was measured: the recorded runs beside other libraries, and asv's history of our own benchmarks.

Only recorded numbers, each with its machine, commit and date. The files are asv_benchmarks/recorded/*.json and, in
asv's own format, asv_benchmarks/recorded/asv/<machine>/*.json.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "asv_benchmarks" / "recorded"


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def source(name: str, found: Any) -> str:
    """Machine, commit and command of a recorded run; the date is that of the commit which recorded it."""
    machine = found["machine"]
    dated = subprocess.run(
        ["git", "log", "-1", "--format=%as", "--", f"asv_benchmarks/recorded/{name}.json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    versions = [
        f"{key} {machine[key]}" for key in ("python", "numpy", "torch", "opacus", "dp-accounting") if key in machine
    ]
    return (
        f"*Recorded {dated or 'at an unknown date'} at commit {machine['commit'][:7]} on {machine['cores']} cores of "
        f"{machine['cpu']}; {', '.join(versions)}.* `{found['command']}`"
    )


def grid(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def duration(seconds: float) -> str:
    """Three digits, in the unit that needs no exponent."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def ratio(measured: dict[str, Any]) -> str:
    value = measured.get("ratio_of_medians")
    return "not measured" if value is None else f"{value:.2f}"


def training(name: str) -> str:
    found = recorded(name)
    contestants = [each for each in next(iter(found["models"].values()))["contestants"] if each != "non-private"]
    rows = []
    for model, measured in found["models"].items():
        plain = measured["contestants"]["non-private"]["median_s"]
        cells = [ratio(measured["contestants"].get(each, {})) for each in contestants]
        rows.append([f"{model}, batch {measured['batch_size']}", f"{1000 * plain:.1f} ms", *cells])
    threads = "1 thread" if found["threads"] == 1 else f"{found['threads']} threads"
    title = f"### A step over a plain one, {threads}: {', '.join(found['models'])}"
    return "\n\n".join([title, grid(["model", "plain step", *contestants], rows), source(name, found)])


def accounting() -> str:
    found = recorded("accounting_vs_peers")
    rows = []
    for name, measured in found["results"].items():
        what, _, who = name.partition(" | ")
        ends = [measured.get("lower"), measured.get("upper")]
        said = " to ".join("-" if end is None else f"{end:.6g}" for end in ends) if any(ends) else ""
        rows.append([what, who, said, duration(measured["median_s"]) if "median_s" in measured else ""])
    return "\n\n".join(
        [
            "### Accountants",
            grid(["task", "by", "lower to upper end", "median"], rows),
            source("accounting_vs_peers", found),
        ]
    )


def peers() -> str:
    names = sorted(path.stem for path in RECORDED.glob("training_vs_peers_*.json"))
    return "\n\n".join([*(training(name) for name in names), accounting()])


def command_line() -> str:
    """What the command line takes: its first line, a comparison in one and two processes, and threads."""
    found = recorded("command_line")
    said, whole = (median(entry[key] for entry in found["first_line"]) for key in ("first_line_s", "whole_s"))
    rows = [[f"`dpcore {found['train']}`: its first line", duration(said)], ["the whole of it", duration(whole)]]
    for jobs, times in found["jobs_s"].items():
        rows.append([f"`dpcore {found['compare']} --jobs {jobs}`", duration(median(times))])
    head = ["features", "hidden", "batch", "products", "one thread", "two", "ratio", "busy: one", "two", "ratio"]
    steps = []
    for quiet, busy in zip(found["threads"], found["threads_while_cores_are_busy"], strict=True):
        shape = [str(quiet[key]) for key in ("features", "hidden", "batch_size")]
        times = [
            text
            for entry in (quiet, busy)
            for text in (
                duration(entry["one_thread_ms"] / 1000),
                duration(entry["two_threads_ms"] / 1000),
                f"{entry['two_over_one']:.2f}",
            )
        ]
        steps.append([*shape, f"{quiet['products']:,}", *times])
    words = (
        "A private step in one thread and in two, on the quiet machine and with another process on each core. Products "
        "are parameters times examples; without hidden units the model is logistic regression."
    )
    return "\n\n".join([grid(["medians", ""], rows), words, grid(head, steps), source("command_line", found)])


def runs() -> Iterator[Any]:
    """asv's results, oldest commit first."""
    found = [json.loads(path.read_text()) for path in RECORDED.glob("asv/*/*.json") if path.stem != "machine"]
    return iter(sorted(found, key=lambda run: run["date"]))


def medians(run: Any, benchmark: str) -> list[float | None]:
    row = run["results"].get(benchmark)
    result = row[0] if isinstance(row, list) else row
    return list(result) if result else []


def asv_history() -> str:
    """A table for each benchmark: a row for each combination of its parameters, a column for each commit."""
    history = list(runs())
    if not history:
        return "No run of asv is recorded yet: `make bench`, then copy its results to `asv_benchmarks/recorded/asv`."
    dates = [datetime.fromtimestamp(run["date"] / 1000, UTC).date() for run in history]
    head = ["", *(f"{run['commit_hash'][:7]}<br>{date}" for run, date in zip(history, dates, strict=True))]
    machine = history[-1]["params"]
    lines = [f"Machine: {machine['cpu']}, {machine['num_cpu']} cores, {machine['os']}. Dates are those of the commits."]
    for benchmark in sorted({name for run in history for name in run["results"]}):
        rows = []
        for number, words in enumerate(combinations(history, benchmark)):
            cells = [cell(medians(run, benchmark), number, benchmark) for run in history]
            rows.append([words, *cells])
        lines += [f"### `{benchmark}`", grid(head, rows)]
    return "\n\n".join(lines)


def combinations(history: list[Any], benchmark: str) -> list[str]:
    """The parameters of each entry of a benchmark's results, as asv numbers them: the last changes first."""
    latest = next(run["results"][benchmark] for run in reversed(history) if run["results"].get(benchmark))
    words = [""]
    for values in latest[1] if len(latest) > 1 else []:
        words = [f"{before}, {value}".strip(", ") for before in words for value in values]
    return words


def cell(values: list[float | None], number: int, benchmark: str) -> str:
    value = values[number] if number < len(values) else None
    if value is None or math.isnan(value):
        return "-"
    if ".track_" in benchmark:
        return f"{value:.6g}"
    return f"{value / 2**20:.0f} MiB" if ".peakmem_" in benchmark else duration(value)
