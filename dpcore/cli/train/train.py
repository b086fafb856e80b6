"""``dpcore train``: one model, one method, one guarantee."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from dpcore import accounting
from dpcore.cli import datasets
from dpcore.cli.interrupt import Interruption, Stopped, deferred
from dpcore.cli.options import Json, flag, takes
from dpcore.cli.output import remark, remarks, write_json, write_line
from dpcore.cli.train.run_folder import RunFolder, check_folder, locked, next_folder
from dpcore.cli.train.settings import PRIVACY, RUN, Settings, settings_from
from dpcore.errors import ArgumentError, DataError, DivergenceError
from dpcore.ledger import Ledger
from dpcore.spec.canonical import read_json_file
from dpcore.spec.validate import nearest
from dpcore.statement.text import WRITTEN_BEFORE, counted, format_epsilon, format_number

if TYPE_CHECKING:
    from dpcore.cli.train.training import Outcome, Training
    from dpcore.plan.plan import Plan

# These belong to one call of the command, not to an experiment.
_NOT_SETTINGS = {"config", "help", "debug", "json", "overwrite"}
# Settings of earlier versions, which a config.json may have.
GONE = ("search_epochs", "account_for_tuning", "tensorboard")
TABLES = "contestants"


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings in a .toml file or in the config.json of a run."""
    try:
        if path.suffix == ".json":
            settings = read_json_file(path)
            settings = settings.get("settings") if isinstance(settings, dict) else None
            if not isinstance(settings, dict):
                raise DataError(f"config={str(path)!r}: holds no settings; name a .toml file or a run's config.json")
            return {key: value for key, value in settings.items() if value is not None and key not in GONE}
        return tomllib.loads(path.read_text("utf-8"))
    except DataError:
        raise
    except OSError as cause:
        raise DataError(f"config={str(path)!r}: cannot be read ({cause.strerror})") from cause
    except ValueError as cause:
        problem, kind = str(cause).splitlines()[0], "JSON" if path.suffix == ".json" else "TOML"
        raise DataError(f"config={str(path)!r}: is not valid {kind} ({problem})") from cause


def use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's settings the defaults of the command; options on the command line win.

    The tables of contestants that ``dpcore compare`` takes are no options, but put into ``context.meta`` as they are.
    """
    if path is None:
        return None
    options = ((option, str(item.name)) for item in context.command.params for option in item.opts)
    known = {key[2:].replace("-", "_"): name for key, name in options if key.startswith("--")}
    known = {key: name for key, name in known.items() if key not in _NOT_SETTINGS}
    defaults = {}
    for key, value in read_config(path).items():
        plain_key = key.replace("-", "_")
        if plain_key == TABLES and context.command.name == "compare" and isinstance(value, dict):
            context.meta[plain_key] = value
            continue
        if plain_key in _NOT_SETTINGS:
            raise ArgumentError(f"config={str(path)!r}: {key!r} belongs to the command line, not into the file")
        if plain_key not in known:
            near = nearest(plain_key, known)
            hint = f"did you mean {near!r}?" if near else f"known keys are {', '.join(sorted(known))}"
            raise ArgumentError(f"config={str(path)!r}: has the unknown key {key!r}; {hint}")
        if isinstance(value, dict) and plain_key != "clipping_groups":
            raise ArgumentError(
                f"config={str(path)!r}: {key!r} is a table; settings stand at the top level, without tables"
            )
        defaults[known[plain_key]] = value
    context.default_map = defaults
    return path


BUDGET_STATUS = 3
"""Exit status of a run that a ledger's budget ended before its plan."""


def run(settings: Settings, out: Path | None, overwrite: bool, as_json: bool, ledger: Path | None = None) -> int:
    """Train by settings, into a run folder; return the exit status."""
    if ledger is not None and _started():
        raise ArgumentError(
            f"--ledger {ledger} under torchrun: must be left out; dpcore.torch.make_private(ledger=) takes one"
        )
    dataset = datasets.load(settings.data, settings.data_dir)
    # The folder's config.json then has every value, also those that the options left open.
    settings = settings.resolved(len(dataset))
    name = f"{dataset.name}-{settings.model}-{settings.method}".replace("_", "-")
    place = next_folder(Path("runs"), name) if out is None else out
    check_folder(place, overwrite=overwrite)
    if ledger is not None:
        Ledger.open(ledger)  # refused here, before torch takes its seconds
    plan = settings.plan(len(dataset))
    remark(accounting.delta_remark(settings.delta, len(dataset)))
    with joined(settings) as rank:
        if not rank:
            remarks().print(first_line(settings, dataset, plan), markup=False)
        # After the quick checks: torch takes a second to import.
        from dpcore.cli.train.training import Training

        training = Training(settings, dataset, ledger)
        if rank:  # beside the first process, without a word
            training.private.begin()
            with deferred() as interruption:
                outcome = training.run(interruption)
            return 0 if outcome.diverged or outcome.complete else interruption.status
        for sentence in training.remarks:
            remark(sentence)
        if ledger is not None:
            _warn_of_budget(ledger, training)
        training.private.begin()
        folder = RunFolder(place, overwrite=overwrite)
        with deferred() as interruption:
            folder.write_config(settings.to_dict(), ledger, training.statement(0).software)
            with locked(folder.path):
                return train_to_end(training, folder, interruption, as_json)


def first_line(settings: Settings, dataset: datasets.Dataset, plan: Plan) -> str:
    """Say what is about to be trained."""
    noise = f"noise multiplier {format_number(settings.noise_multiplier or 0.0)}"
    if settings.epsilon is not None:
        noise = f"noise for epsilon = {format_number(settings.epsilon)} at delta = {format_number(settings.delta)}"
    return (
        f"Training {settings.model} on {dataset.name} by {settings.method}: {counted(len(dataset), 'example')}, "
        f"{counted(plan.steps, 'step')}, {noise}"
    )


def train_to_end(training: Training, folder: RunFolder, interruption: Interruption, as_json: bool) -> int:
    """Train a run that is built, and finish its folder; return the exit status."""
    console, steps = remarks(), training.private.plan.steps
    target = format_epsilon(training.private.epsilon(planned=True), digits=3)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("training", total=steps)

            def tell(taken: int, evaluation: Mapping[str, Any] | None) -> None:
                bar.update(task, completed=taken)
                if evaluation is not None:
                    console.print(
                        f"epoch {evaluation['epoch']:.4g} of {training.settings.epochs}: held-out accuracy "
                        f"{100 * evaluation['test_accuracy']:.1f}%, epsilon "
                        f"{format_epsilon(evaluation['epsilon'], digits=3)} of {target}"
                    )

            outcome = training.run(interruption, folder, tell)
    except Stopped as stop:
        raise Stopped(f"{stop}; {_left(folder)}", stop.status) from stop
    except Exception:
        remark(_left(folder))
        raise
    if outcome.diverged:
        stated = outcome.statement
        raise DivergenceError(
            f"training diverged: after {stated.steps_taken:,} of {stated.steps_planned:,} steps {outcome.diverged} no "
            f"longer finite; lower --lr ({training.settings.lr:g}). No model was kept; what was spent is spent, "
            f"epsilon = {format_epsilon(stated.best_epsilon)} at delta = {format_number(stated.delta)}: "
            f"{folder.path / 'statement.txt'}"
        )
    _tell(folder, training, outcome, interruption, as_json)
    if outcome.budget:
        return BUDGET_STATUS
    return 0 if outcome.complete else interruption.status


def _warn_of_budget(ledger: Path, training: Training) -> None:
    opened, plan = Ledger.open(ledger), training.private.plan
    left = None if opened.budget is None else opened.remaining()
    # A run whose first step is refused ends with an error of its own.
    if left is not None and left.fits(plan.event_after(1)) and not left.fits(plan.event):
        remark(
            f"the ledger's budget does not pay for all {plan.steps:,} steps; training stops before "
            "it is crossed, and what was spent until then is spent"
        )


def _left(folder: RunFolder) -> str:
    """Say of a run that ended badly where it stands what was spent."""
    statement = folder.path / "statement.txt"
    if folder.stated is not None:
        upper = folder.stated.note.startswith(WRITTEN_BEFORE)
        bound = "an upper bound of what was spent: it counts the whole epoch" if upper else "what was spent"
        return f"{statement} states {bound}"
    return "no step was taken, and nothing was spent"


def _tell(folder: RunFolder, training: Training, outcome: Outcome, interruption: Interruption, as_json: bool) -> None:
    statement, last = outcome.statement, training.evaluations[-1]
    who = "the ledger's budget" if outcome.budget else interruption.name
    if as_json:
        spent = {"epsilon": statement.best_epsilon, "delta": statement.delta}
        write_json({"status": "complete" if outcome.complete else f"stopped by {who}", **spent,
            "test_accuracy": last["test_accuracy"],
            "test_loss": last["test_loss"], "run_folder": str(folder.path),
            "settings": training.settings.to_dict(), "statement": statement.to_dict()})  # fmt: skip
        return
    if not outcome.complete:
        write_line(
            f"Stopped by {who} after {statement.steps_taken:,} of {statement.steps_planned:,} steps; "
            "what was spent until then is spent."
        )
    write_line(f"held-out accuracy  {100 * last['test_accuracy']:.2f}%")
    if statement.private:
        write_line(
            f"privacy spent      epsilon = {format_epsilon(statement.best_epsilon)} at delta = "
            f"{format_number(statement.delta)}, {statement.adjacency} adjacency"
        )
    else:
        write_line("privacy spent      epsilon is infinite: this run is NOT private")
    write_line(f"run folder         {folder.path}")


def _started() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ


@contextmanager
def joined(settings: Settings) -> Iterator[int]:
    """Join the other processes that torchrun started, for the length of the block; give this one's rank, or 0."""
    if not _started():
        yield 0
        return
    import torch
    import torch.distributed as dist

    if settings.backend == "triton" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


LedgerFile = Annotated[Path | None, typer.Option(metavar="FILE", rich_help_panel=PRIVACY,
    help="Pay for every step from this ledger, and stop before its budget is crossed (dpcore ledger create).",
)]  # fmt: skip


@takes(Settings)
def train(
    ledger: LedgerFile = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Run folder; runs/DATA-MODEL-METHOD if not given.",
        rich_help_panel=RUN)] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace the run in that folder.", RUN)] = False,
    config: Annotated[Path | None, typer.Option(is_eager=True, callback=use_config, metavar="FILE",  # noqa: ARG001 (its callback reads it)
        help="Settings from a .toml file, or from a run's config.json; options win.", rich_help_panel=RUN)] = None,
    as_json: Json = False,
    **given: Any,
) -> int:  # fmt: skip
    """Train a model with a stated privacy guarantee."""
    return run(settings_from(given), out, overwrite, as_json, ledger)
