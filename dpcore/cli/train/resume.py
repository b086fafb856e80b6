"""``dpcore train --resume``: a run that was stopped or killed goes on, and nothing that it paid for is lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dpcore.accounting.branches import Branch, Branches, count
from dpcore.cli.interrupt import deferred
from dpcore.cli.output import remarks
from dpcore.cli.train import config_file
from dpcore.cli.train.run import check_beside, first_line, train
from dpcore.cli.train.run_folder import RunFolder, content_of, holds, locked
from dpcore.cli.train.settings import Settings
from dpcore.errors import ArgumentError, DataError, DpcoreError
from dpcore.spec.canonical import plain
from dpcore.statement.text import counted, format_epsilon

if TYPE_CHECKING:
    from dpcore.cli.train.training import Training

_BESIDE = {"resume", "ledger", "as_json", "debug"}


def use(context: typer.Context, path: Path | None) -> Path | None:
    """Make the settings of the run in this folder those of the command; `check` refuses a folder without one."""
    if path is not None and holds(path):
        config_file.use(context, path / "config.json")
        # Of one that was moved the checkpoint knows more, and --ledger says so.
        if context.default_map is not None:
            context.default_map.pop("ledger", None)
    return path


def check(context: typer.Context, path: Path) -> None:
    """Refuse a folder that holds no run, and options beside ``--resume`` that belong to the run."""
    if not holds(path):
        raise DataError(f"resume={str(path)!r}: holds no run of dpcore train; name the run folder")
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in _BESIDE and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            raise ArgumentError(f"{parameter.opts[0]}: must be left out, since --resume has the settings of the run")


def resume(settings: Settings, path: Path, as_json: bool, ledger: Path | None) -> int:
    """Go on with the run in a folder, which has these settings, from its checkpoint; return the exit status.

    `ledger` is where the run's ledger is now; by default where it was.
    """
    with locked(path):
        from dpcore.cli.datasets import load

        folder = RunFolder(path, existing=True)
        stated = content_of(path / "statement.json")  # empty where the run was killed before there was one
        if not folder.checkpoint.exists():
            raise DataError(f"resume={str(path)!r}: {_why_not(stated, folder.checkpoint)}")
        dataset = load(settings.data, settings.data_dir)
        settings = settings.resolved(len(dataset))
        check_beside(settings, ledger)
        remarks().print(first_line(settings, dataset, settings.plan(len(dataset))), markup=False)
        from dpcore.cli.train import checkpoint  # imports torch, which takes seconds

        saved = checkpoint.read(folder.checkpoint)
        _check(saved, settings, stated, folder)
        ledger = _ledger(saved, ledger)
        from dpcore.cli.train.training import Training

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
            return train(training, folder, ledger, interruption, as_json)


def _why_not(stated: Mapping[str, Any], checkpoint: Path) -> str:
    if stated and not stated.get("note") and stated.get("steps_taken") == stated.get("steps_planned"):
        return "is complete"
    if not stated.get("ledger"):
        return "has no checkpoint: only a run with --ledger keeps one, which knows what was released since"
    return f"its checkpoint, {checkpoint}, is missing; put it back (it lies beside the folder, and moves with it)"


def _check(saved: Mapping[str, Any], settings: Settings, stated: Mapping[str, Any], folder: RunFolder) -> None:
    """Refuse the checkpoint of another run."""
    own = _of_ledger(saved).get("run")
    if (stated.get("ledger") or {}).get("run", own) != own:
        raise DataError(f"checkpoint {folder.checkpoint}: belongs to another run than the one in {folder.path}")
    held, given = saved["settings"], plain(settings.to_dict())
    for name in {**held, **given}:
        if held.get(name) != given.get(name):
            raise DataError(
                f"{folder.path / 'config.json'}: its {name} is {given.get(name)!r}, and the run has "
                f"{held.get(name)!r}; put it back, or train anew with --config"
            )


def _of_ledger(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    return saved["optimizer"]["dpcore"]["public"]["ledger"] or {}


def _ledger(saved: Mapping[str, Any], given: Path | None) -> Path:
    """Return the path of the ledger that pays for the run."""
    from dpcore.ledger import Ledger

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
    """Say where the run goes on, and what that costs."""
    state, steps, now = saved["optimizer"]["dpcore"]["public"], training.plan.steps, training.private.statement()
    known = {name: Branch(*branch) for name, branch in state["branches"].items()}
    lost = now.steps_abandoned - count(Branches(state["branch"], known).abandoned)
    where = f"Going on after step {training.private.steps_taken:,} of {steps:,}, with fresh noise"
    if not lost:
        return f"{where}. This costs 0 steps: nothing was released since."
    return (
        f"{where}. This costs {counted(lost, 'step')}, which may have been released since the checkpoint and stay "
        f"counted; with {counted(now.steps_abandoned, 'abandoned step')} in all the whole run comes to epsilon = "
        f"{format_epsilon(training.epsilon_after(steps))}."
    )
