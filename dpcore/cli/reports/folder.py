"""The files of a folder that ``dpcore verify`` compares with its statement, config.json among them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from dpcore.cli.options import parsers
from dpcore.cli.train.run_folder import COMPARISON, RUNS, holds
from dpcore.cli.train.settings import SETTINGS, Settings, settings_from
from dpcore.errors import DpcoreError
from dpcore.plan.plan import Plan
from dpcore.spec.canonical import read_json_file
from dpcore.statement.card import facts
from dpcore.statement.statement import Statement
from dpcore.statement.verify.finding import FAILED, OK, TRUSTED, Finding, difference
from dpcore.statement.verify.folder import beside, looked_at

CONFIG = "config.json"
# A calibrated run comes to its target, and not far below it: the search ends within a thousandth.
_NEAR = 0.9
_LARGEST_TARGET = 50.0
# Neither a setting of the mechanism nor the sampler's own: `state` adds them.
_ADDED = ("adjacency", "unit")


def folder_findings(folder: Path, content: Mapping[str, Any]) -> list[Finding]:
    """Compare the files of a run's folder, or of an export, with its statement; name those that nothing looks at."""
    try:
        statement = Statement.unchecked(content)
    except (DpcoreError, LookupError, TypeError, ValueError):  # which the check of the statement itself has told
        return [_unchecked(folder, {"statement.json"})]
    found, looked = list(beside(folder, statement)), looked_at(folder)
    if holds(folder):
        looked.add(CONFIG)
        found.append(_config(folder, statement))
    return [*found, _unchecked(folder, looked)]


def comparison_findings(folder: Path, content: Mapping[str, Any], runs: Mapping[str, dict[str, Any]]) -> list[Finding]:
    """Compare the statement.txt of a comparison's folder with what it is made of."""
    name = "statement.txt"
    if not (folder / name).exists() and not holds(folder, COMPARISON):  # the statements alone
        return []
    try:
        parts = [f"\n\n{row}\n\n{Statement.unchecked(run).text()}" for row, run in runs.items()]
        text = (folder / name).read_bytes().decode("utf-8")
        same = text.endswith("".join([str(content["tuning"]["words"]), "\n", *parts]))
    except OSError as cause:
        found = Finding(name, FAILED, f"{name} cannot be read ({cause.strerror})")
    except (DpcoreError, LookupError, TypeError, ValueError):
        found = Finding(name, FAILED, f"{name} cannot be compared with statement.json")
    else:
        words = (
            "what the statements of these runs say" if same else f"{name} is not what statement.json and its runs say"
        )
        found = Finding(name, OK if same else FAILED, words)
    named = {str(path) for path in content["run_folders"].values()}
    others = {path.relative_to(folder).as_posix() for path in folder.glob(f"{RUNS}/*")} - named
    return [found, _unchecked(folder, {name, "statement.json", RUNS}, sorted(others))]


def _unchecked(folder: Path, looked: set[str], more: list[str] | None = None) -> Finding:
    names = [*sorted({path.name for path in folder.iterdir()} - looked), *(more or ())]
    return Finding("other files", TRUSTED, f"not checked: {', '.join(names)}" if names else "there are none")


def _config(folder: Path, statement: Statement) -> Finding:
    try:
        problem = _problem(folder, read_json_file(folder / CONFIG)["settings"], statement)
    except (DpcoreError, typer.BadParameter, OSError, LookupError, TypeError, ValueError, AttributeError) as cause:
        words = " ".join(str(getattr(cause, "message", cause)).split())[:200]
        return Finding(CONFIG, FAILED, f"the settings of {CONFIG} make no run: {words}")
    if problem is not None:
        return Finding(CONFIG, FAILED, f"{CONFIG} is of another run than the statement, or was changed: {problem}")
    return Finding(CONFIG, OK, "its settings make this plan; data, model and seed are not in the statement")


def _problem(folder: Path, given: Mapping[str, Any], statement: Statement) -> str | None:
    """Say where the settings make another plan than the one that is stated."""
    read = parsers(Settings)
    settings = settings_from({n: read[n](v) for n, v in given.items() if n in SETTINGS and v is not None})
    strange = sorted(set(given) - {*SETTINGS, "ledger"})
    if strange:
        return f"it has the unknown setting {strange[0]!r}"
    plan = settings.plan(int(statement.sampler["dataset_size"]))
    sigma = statement.method["noise"]["noise_multiplier"]
    noisy = plan.method.with_noise_multiplier(sigma) if settings.noise_multiplier is None else plan.method
    sampler = {name: value for name, value in statement.sampler.items() if name not in _ADDED}
    own = {name: value for name, value in plan.sampler.describe().items() if name not in _ADDED}
    for stated, derived, where in (
        (statement.steps_planned, plan.steps, "steps planned"),
        (statement.method, noisy.describe(), "method"),
        (sampler, own, "sampler"),
        (statement.delta, settings.delta, "delta"),
        (statement.software.get("backend"), settings.backend, "backend"),
    ):
        found = difference(stated, derived, where=where)
        if found is not None:
            return found
    return _target(settings, statement, plan) or _ledger(given, statement) or _model(folder, settings)


def _target(settings: Settings, statement: Statement, plan: Plan) -> str | None:
    """The noise was calibrated for the planned steps; those of branches that were left came on top."""
    target = settings.epsilon
    if target is None or statement.steps_abandoned or not statement.epsilon_planned or plan.steps == 0:
        return None
    planned = min(statement.epsilon_planned.values())
    if planned > target * (1 + 1e-6) or (planned < _NEAR * target and target <= _LARGEST_TARGET):
        return f"its target is epsilon = {target:g}, and the planned steps come to {planned:.4g}"
    return None


def _ledger(given: Mapping[str, Any], statement: Statement) -> str | None:
    if "ledger" not in given or (given["ledger"] is None) == (not statement.ledger):
        return None
    return f"its ledger is {given['ledger']!r}, and the statement has {'one' if statement.ledger else 'none'}"


def _model(folder: Path, settings: Settings) -> str | None:
    """The card says which data and which model."""
    try:
        rows = facts((folder / "README.md").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    for name in ("data", "model"):
        if rows.get(name, getattr(settings, name)) != getattr(settings, name):
            return f"its {name} is {getattr(settings, name)!r}, and README.md says {rows[name]!r}"
    return None
