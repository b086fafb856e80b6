"""``dpcore demo``: three methods on the built-in digits, at one guarantee, over several seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dpcore.cli import options
from dpcore.cli.output import remarks, write_json, write_line
from dpcore.cli.train.interrupt import Stopped, deferred
from dpcore.cli.train.run_folder import DEMO, RunFolder
from dpcore.cli.train.settings import Settings
from dpcore.cli.values import count, real
from dpcore.errors import ArgumentError
from dpcore.statement.text import format_epsilon, format_number

if TYPE_CHECKING:
    from dpcore.cli.train.interrupt import Interruption
    from dpcore.statement.statement import Statement

# The same model, clip, batch size and epochs for all; learning rates from a search over one grid for all three, with
# other seeds than those shown (docs/command-line.md has its table). That search is not part of the guarantee.
COMMON = Settings(model="mlp", epsilon=1.0, delta=1e-5, epochs=10, batch_size=64, clipping="automatic")
CONTESTANTS = {
    "DP-SGD": replace(COMMON, method="dp_sgd", lr=0.35),
    "DOPPLER": replace(COMMON, method="doppler", lr=0.7),
    "DiSK": replace(COMMON, method="disk", lr=0.35),
}
REMARK = (
    "Each row is several runs, each with this guarantee on its own. All of them together, and the earlier search for "
    "learning rates, spend more: on private data that would have to be counted."
)


@dataclass(frozen=True)
class Series:
    """One method's runs: held-out accuracy by seed and epoch, and the statement that each of its runs has."""

    accuracy: npt.NDArray[np.float64]
    statement: Statement

    @property
    def final(self) -> npt.NDArray[np.float64]:
        """Accuracy at the end, by seed."""
        return self.accuracy[:, -1]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return float(self.final.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; NaN for a single seed."""
        return float(self.final.std(ddof=1) / math.sqrt(len(self.final))) if len(self.final) > 1 else math.nan


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the table, picture and statements go.")] = Path(
        "demo"
    ),
    seeds: Annotated[int, typer.Option(parser=count, metavar="N", help="Runs of each method.")] = 6,
    epsilon: Annotated[float, typer.Option(parser=real, metavar="EPSILON", help="The guarantee of each run.")] = 1.0,
    delta: Annotated[float, typer.Option(parser=real, metavar="DELTA", help="Well below 1/1438.")] = 1e-5,
    as_json: options.Json = False,
    debug: options.Debug = False,  # noqa: ARG001 (read by dpcore.cli.app)
) -> None:
    """Compare DP-SGD, DOPPLER and DiSK on the built-in digits, at the same epsilon and delta."""
    if seeds < 1:
        raise ArgumentError(f"seeds={seeds}: must be at least 1")
    console = remarks()
    contestants = {name: replace(settings, epsilon=epsilon, delta=delta) for name, settings in CONTESTANTS.items()}
    # A demo is there to be run again; its folder is known by its mark, and nothing else is ever deleted.
    folder = RunFolder(out, overwrite=True, kind=DEMO)
    with deferred() as interruption:
        try:
            series, epochs, spent = _train(contestants, seeds, console, interruption, folder)
        except Stopped as stop:
            each = f"epsilon = {format_number(epsilon)} at delta = {format_number(delta)}"
            raise Stopped(f"{stop}; each run that was begun spent at most {each}", stop.status) from stop
        if interruption:
            raise typer.Exit(interruption.status)
        _write(folder, series, contestants, seeds, epochs, spent)
    if as_json:
        write_json(_results(series, contestants, seeds))
    else:
        _show(series, contestants, seeds, folder)


def _train(
    contestants: dict[str, Settings], seeds: int, console: Console, interruption: Interruption, folder: RunFolder
) -> tuple[dict[str, Series], list[float], list[float]]:
    # torch takes a second to import; bad options are told before that.
    import torch

    from dpcore.cli.datasets import load
    from dpcore.cli.train.training import Training

    dataset = load("digits")
    # At this size a second thread costs more than it brings.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    series: dict[str, Series] = {}
    epochs: list[float] = []
    spent: list[float] = []
    columns = (TextColumn("{task.description:<24}"), BarColumn(bar_width=30), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=len(contestants) * seeds)
        for name, settings in contestants.items():
            curves: list[list[float]] = []
            for seed in range(seeds):
                progress.update(task, description=f"{name}, seed {seed + 1} of {seeds}")
                training = Training(replace(settings, seed=seed), dataset)
                if not series and not curves:
                    versions = training.statement(0).software
                    folder.write_config({key: item.to_dict() for key, item in contestants.items()}, versions)
                outcome = training.run([], interruption)
                if interruption:
                    complete = len(series) * seeds + len(curves)
                    _stopped(folder, console, interruption, complete, outcome.statement)
                    return series, epochs, spent
                curves.append([item.test_accuracy for item in outcome.evaluations])
                epochs = [item.epoch for item in outcome.evaluations]
                spent = [item.epsilon for item in outcome.evaluations]
                progress.advance(task)
            series[name] = Series(np.array(curves), outcome.statement)
            if not console.is_terminal:
                console.print(f"{name}: {seeds} runs, mean held-out accuracy {100 * series[name].mean:.1f}%")
    torch.set_num_threads(threads)
    return series, epochs, spent


def _stopped(
    folder: RunFolder, console: Console, interruption: Interruption, complete: int, statement: Statement
) -> None:
    """Leave a statement of the run that was stopped, and say what the ones before it spent."""
    folder.write_statement(statement)
    console.print(
        f"Stopped by {interruption.name}. Complete were {complete} runs, each at its full epsilon; the run in progress "
        f"spent epsilon = {format_epsilon(statement.best_epsilon)} in {statement.steps_taken:,} of "
        f"{statement.steps_planned:,} steps. Nothing was compared. Folder: {folder.path}"
    )


def _write(
    folder: RunFolder,
    series: dict[str, Series],
    contestants: dict[str, Settings],
    seeds: int,
    epochs: list[float],
    spent: list[float],
) -> None:
    from dpcore.cli.plots import plots

    one = next(iter(contestants.values()))
    guarantee = f"epsilon = {format_epsilon(max(spent))}, delta = {format_number(one.delta)}"
    plots.comparison(
        folder.path / "comparison.png",
        {name: item.accuracy for name, item in series.items()},
        epochs,
        spent,
        title=f"digits, {one.model}, {guarantee} for each run, {seeds} seeds",
    )
    folder.write_json("results.json", _results(series, contestants, seeds))
    statements = [item.statement for item in series.values()]
    folder.write("statement.txt", ("\n\n".join(item.text() for item in statements) + f"\n{REMARK}\n").encode())
    folder.write_json("statement.json", {name: item.statement.to_dict() for name, item in series.items()})


def _results(series: dict[str, Series], contestants: dict[str, Settings], seeds: int) -> dict[str, Any]:
    return {
        "seeds": seeds,
        "methods": {
            name: {
                "test_accuracy": item.final.tolist(),
                "mean": item.mean,
                "standard_error": None if math.isnan(item.standard_error) else item.standard_error,
                "epsilon": item.statement.best_epsilon,
                "delta": item.statement.delta,
                "settings": contestants[name].to_dict(),
            }
            for name, item in series.items()
        },
        "remark": REMARK,
    }


def _show(series: dict[str, Series], contestants: dict[str, Settings], seeds: int, folder: RunFolder) -> None:
    table = Table(title=f"Held-out accuracy on the digits, {seeds} seeds", title_justify="left")
    table.add_column("method")
    table.add_column("learning rate", justify="right")
    table.add_column("noise multiplier", justify="right")
    table.add_column("accuracy", justify="right")
    table.add_column("epsilon", justify="right")
    table.add_column("delta", justify="right")
    for name, item in series.items():
        error = "" if math.isnan(item.standard_error) else f" ± {100 * item.standard_error:.2f}"
        table.add_row(
            name,
            format_number(contestants[name].lr or 0),
            f"{item.statement.noise['noise_multiplier']:.3f}",
            f"{100 * item.mean:.2f}{error} %",
            format_epsilon(item.statement.best_epsilon),
            format_number(item.statement.delta),
        )
    Console(highlight=False).print(table)
    statement = next(iter(series.values())).statement
    write_line(_verdict(series))
    write_line()
    write_line(
        f"Guarantee of each run: ({format_epsilon(statement.best_epsilon)}, {format_number(statement.delta)})-"
        f"differential privacy under {statement.adjacency} adjacency, {statement.steps_taken:,} steps."
    )
    write_line(REMARK)
    write_line(f"Picture: {folder.path / 'comparison.png'}   Statements: {folder.path / 'statement.txt'}")


def _verdict(series: dict[str, Series]) -> str:
    """Say which method came out first, and whether the runs can tell it from DP-SGD (or DP-SGD from the next)."""
    base = next(iter(series))
    first, second = sorted(series, key=lambda name: series[name].mean, reverse=True)[:2]
    other = second if first == base else base
    gap = series[first].mean - series[other].mean
    error = math.hypot(series[first].standard_error, series[other].standard_error)
    words = f"{first} came out {100 * gap:.2f} points above {other}, "
    if math.isnan(error):
        return words + "and one seed cannot tell luck from merit."
    clear = "more" if gap > 2 * error else "less"
    luck = "" if gap > 2 * error else ", so it may be luck"
    words += f"{clear} than two standard errors of the difference (2 x {100 * error:.2f}){luck}."
    return words + (" The papers' ordering does not show in this setting." if first == base else "")
