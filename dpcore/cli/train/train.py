"""``dpcore train``: one model, one method, one guarantee."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from dpcore import accounting
from dpcore.accounting.branches import Branch, Branches, count
from dpcore.cli import datasets
from dpcore.cli.interrupt import Interruption, Stopped, deferred
from dpcore.cli.options import Json, flag, takes
from dpcore.cli.output import remark, remarks, write_json, write_line
from dpcore.cli.train.run_folder import RunFolder, check_folder, content_of, holds, locked, next_folder
from dpcore.cli.train.settings import PRIVACY, RUN, Settings, settings_from, stored_settings
from dpcore.errors import ArgumentError, DataError, DivergenceError, DpcoreError
from dpcore.ledger import Ledger
from dpcore.spec.canonical import plain, read_json_file
from dpcore.spec.validate import nearest
from dpcore.statement.text import WRITTEN_BEFORE, counted, format_epsilon, format_number

if TYPE_CHECKING:
    from dpcore.cli.train.training import Outcome, Training
    from dpcore.plan.plan import Plan

# These belong to one call of the command, not to an experiment.
_NOT_SETTINGS = {"config", "help", "debug", "json", "overwrite"}
# Settings of earlier versions, which a config.json or a checkpoint may have.
GONE = ("search_epochs", "account_for_tuning", "tensorboard")
TABLES = "contestants"


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings in a .toml file or in the config.json of a run."""
    try:
        if path.suffix == ".json":
            settings = read_json_file(path)
            settings = settings.get("settings") if isinstance(settings, dict) else None
            if not isinstance(settings, dict):
                raise DataError(f"config={str(path)!r}: has no settings; name a .toml file or a run's config.json")
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
                f"config={str(path)!r}: {key!r} is a table; settings must be at the top level, without tables"
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
            f"--ledger {ledger} under torchrun: must be left out, since the command saves no checkpoints of several "
            "processes; dpcore.torch.make_private(ledger=) takes one"
        )
    dataset = datasets.load(*settings.source)
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
        if rank:  # the first process writes for all
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
    """Return a line on the run that is about to begin."""
    noise = f"noise multiplier {format_number(settings.noise_multiplier or 0.0)}"
    if settings.epsilon is not None:
        noise = f"noise for epsilon = {format_number(settings.epsilon)} at delta = {format_number(settings.delta)}"
    return (
        f"Training {settings.model} on {dataset.name} by {settings.method}: {counted(len(dataset), 'example')}, "
        f"{counted(plan.steps, 'step')}, {noise}"
    )


def train_to_end(training: Training, folder: RunFolder, interruption: Interruption, as_json: bool) -> int:
    """Train a new or resumed run to its end, and finish its folder; return the exit status."""
    from dpcore.cli.train.training import cost

    console, steps = remarks(), training.private.plan.steps
    target = format_epsilon(training.private.epsilon(planned=True), digits=3)
    if training.ledger is not None:
        remark(cost(steps))
        training.save(folder.checkpoint)  # after a resume too, so that what the last kill left is reported once
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
        raise Stopped(f"{stop}; {_record(folder)}", stop.status) from stop
    except Exception:
        remark(_record(folder))
        raise
    if outcome.diverged or outcome.complete:
        folder.checkpoint.unlink(missing_ok=True)
    if outcome.diverged:
        stated = outcome.statement
        raise DivergenceError(
            f"training diverged: after {stated.steps_taken:,} of {stated.steps_planned:,} steps {outcome.diverged} no "
            f"longer finite; lower --lr ({training.settings.lr:g}). No model was kept; results ended the run, so "
            f"that all its steps count: epsilon = {format_epsilon(training.private.epsilon(planned=True))} at "
            f"delta = {format_number(stated.delta)}: {folder.path / 'statement.txt'}"
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
            "it is crossed, and what was spent by then stays spent"
        )


def _record(folder: RunFolder) -> str:
    """Return which file of a run that ended badly states what was spent, and how to continue."""
    statement = folder.path / "statement.txt"
    if folder.stated is not None:
        upper = folder.stated.note.startswith(WRITTEN_BEFORE)
        bound = "an upper bound of what was spent: it counts the whole epoch" if upper else "what was spent"
        said = f"{statement} states {bound}"
    elif statement.exists():
        said = f"no step was taken, and {statement} states what was spent before, or more"
    else:
        said = "no step was taken, and nothing was spent"
    return f"{said}; to continue: {_command(folder)}" if folder.checkpoint.exists() else said


def _command(folder: RunFolder) -> str:
    return f"dpcore train --resume {quote(str(folder.path))}"


def _tell(folder: RunFolder, training: Training, outcome: Outcome, interruption: Interruption, as_json: bool) -> None:
    statement, last = outcome.statement, training.evaluations[-1]
    # Another run of the ledger may still give back what it reserved.
    when = ", if the ledger has room again" if outcome.budget else ""
    who = "the ledger's budget" if outcome.budget else interruption.name
    if as_json:
        spent = {"epsilon": statement.best_epsilon, "delta": statement.delta}
        write_json({"status": "complete" if outcome.complete else f"stopped by {who}", **spent,
            "test_accuracy": last["test_accuracy"],
            "test_loss": last["test_loss"], "run_folder": str(folder.path),
            **({"resume": _command(folder)} if folder.checkpoint.exists() else {}),
            "settings": training.settings.to_dict(), "statement": statement.to_dict()})  # fmt: skip
        return
    if not outcome.complete:
        write_line(
            f"Stopped by {who} after {statement.steps_taken:,} of {statement.steps_planned:,} steps; "
            "what was spent by then stays spent."
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
    if folder.checkpoint.exists():
        write_line(f"to continue        {_command(folder)}{when}")


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


_WITH_RESUME = {"resume", "ledger", "as_json", "debug"}


def settings_of_run(context: typer.Context, path: Path) -> Settings:
    """Return the settings of the run in a folder; refuse options that ``--resume`` takes from the run."""
    if not holds(path):
        raise DataError(f"resume={str(path)!r}: has no run of dpcore train; name the run folder")
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in _WITH_RESUME and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            raise ArgumentError(f"{parameter.opts[0]}: must be left out, since --resume has the settings of the run")
    return stored_settings(read_config(path / "config.json"))


def go_on(settings: Settings, path: Path, as_json: bool, ledger: Path | None) -> int:
    """Continue the run in a folder, which has these settings; `ledger` is its ledger's path now, if it moved."""
    with locked(path):
        folder = RunFolder(path, existing=True)
        stated = content_of(path / "statement.json")  # empty if the run was killed before there was one
        if not folder.checkpoint.exists():
            why = f"its checkpoint, {folder.checkpoint}, is missing; put it back (it belongs next to the folder)"
            if not stated.get("ledger"):
                why = "has no checkpoint: only a run with --ledger keeps one, since the ledger records later releases"
            if stated and not stated.get("note") and stated.get("steps_taken") == stated.get("steps_planned"):
                why = "is complete"
            raise DataError(f"resume={str(path)!r}: {why}")
        dataset = datasets.load(*settings.source)
        settings = settings.resolved(len(dataset))
        remarks().print(first_line(settings, dataset, settings.plan(len(dataset))), markup=False)
        from dpcore.cli.train.training import Training, read_checkpoint  # imports torch, which takes seconds

        saved = read_checkpoint(folder.checkpoint)
        _check(saved, settings, stated, folder)
        ledger = _ledger(saved, ledger)
        training = Training(settings, dataset, ledger)
        try:
            training.load_state_dict(saved)
        except DpcoreError:
            raise
        except (KeyError, TypeError, RuntimeError) as cause:
            raise DataError(f"checkpoint {folder.checkpoint}: does not fit this version's model and method") from cause
        remarks().print(_how(training, saved))
        training.private.begin()
        # Its digests are those of a model and a statement that do not stay.
        (path / "README.md").unlink(missing_ok=True)
        with deferred() as interruption:
            return train_to_end(training, folder, interruption, as_json)


def _check(saved: Mapping[str, Any], settings: Settings, stated: Mapping[str, Any], folder: RunFolder) -> None:
    """Refuse the checkpoint of another run."""
    own = _of_ledger(saved).get("run")
    if (stated.get("ledger") or {}).get("run", own) != own:
        raise DataError(f"checkpoint {folder.checkpoint}: belongs to another run than the one in {folder.path}")
    # Checkpoints from before --precision are of float32.
    former, given = {"precision": "float32", **saved["settings"]}, plain(settings.to_dict())
    for name in ({**former, **given}).keys() - set(GONE):
        if former.get(name) != given.get(name):
            raise DataError(
                f"{folder.path / 'config.json'}: its {name} is {given.get(name)!r}, and the run has "
                f"{former.get(name)!r}; put it back, or start a new run with --config"
            )


def _of_ledger(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    return saved["optimizer"]["dpcore"]["public"]["ledger"] or {}


def _ledger(saved: Mapping[str, Any], given: Path | None) -> Path:
    """Return the path of the ledger that pays for the run."""
    path = Path(saved["ledger"]) if given is None else given
    if given is None and not path.exists():
        raise DataError(f"ledger {path}: the run's ledger is not there; say where it is now with --ledger FILE")
    opened, known = Ledger.open(path), _of_ledger(saved)
    if opened.ledger_id != known.get("ledger"):
        raise DataError(f"ledger {path}: is not the one that pays for this run; name that one with --ledger FILE")
    if all(run.run_id != known["run"] for run in opened.runs()):
        raise DataError(f"ledger {path}: is a copy from before this run; put the newest one in its place")
    return path


def _how(training: Training, saved: Mapping[str, Any]) -> str:
    """Report where the run continues, and the cost of that."""
    state, private = saved["optimizer"]["dpcore"]["public"], training.private
    steps, now = private.plan.steps, private.statement()
    known = {name: Branch(*branch) for name, branch in state["branches"].items()}
    lost = now.steps_abandoned - count(Branches(state["branch"], known).abandoned)
    where = f"Continuing after step {private.steps_taken:,} of {steps:,}, with fresh noise"
    if not lost:
        return f"{where}. This costs 0 steps: nothing was released since."
    return (
        f"{where}. This costs {counted(lost, 'step')}, which may have been released since the checkpoint and stay "
        f"counted; with {counted(now.steps_abandoned, 'abandoned step')} in all the whole run comes to epsilon = "
        f"{format_epsilon(training.private.epsilon(planned=True))}."
    )


LedgerFile = Annotated[Path | None, typer.Option(metavar="FILE", rich_help_panel=PRIVACY,
    help="Ledger that pays for every step; the run stops before its budget is crossed (dpcore ledger create).",
)]  # fmt: skip


@takes(Settings)
def train(
    context: typer.Context,
    ledger: LedgerFile = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Run folder; runs/DATA-MODEL-METHOD if not given.",
        rich_help_panel=RUN)] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace the run in that folder.", RUN)] = False,
    config: Annotated[Path | None, typer.Option(is_eager=True, callback=use_config, metavar="FILE",  # noqa: ARG001 (its callback reads it)
        help="Settings from a .toml file, or from a run's config.json; options win.", rich_help_panel=RUN)] = None,
    resume: Annotated[Path | None, typer.Option(metavar="FOLDER",
        help="Continue the run in this folder, which a ledger pays for, from its checkpoint.",
        rich_help_panel=RUN)] = None,
    as_json: Json = False,
    **given: Any,
) -> int:  # fmt: skip
    """Train a model with a stated privacy guarantee."""
    if resume is not None:
        return go_on(settings_of_run(context, resume), resume, as_json, ledger)
    return run(settings_from(given), out, overwrite, as_json, ledger)
