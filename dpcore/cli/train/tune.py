"""``dpcore tune``: the best of a secret number of runs with settings drawn at random, at one guarantee for all.

The score is accuracy on one half of the test set. It is a function of a run's releases and of these examples. As to the
training set, they are constants: choosing by the score is post-processing. So it costs nothing there if, as the user
declares, the two sets are disjoint. For the test set nothing is guaranteed, since the winner depends on it without
noise: hence the user's word that it needs no protection. (To compare the sets by their values would release an answer
about the training set.) The other half measures the winner: what chooses does not measure what was chosen.

A candidate trains in memory. Until the end the settings that were drawn, and the best run so far, lie in a secret
folder next to the run folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from io import BytesIO
from itertools import product
from math import isfinite, prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from dpcore import accounting
from dpcore.accounting import Event, PrivateSelection
from dpcore.cli import datasets
from dpcore.cli.datasets import Dataset
from dpcore.cli.interrupt import Interruption, Stopped
from dpcore.cli.options import Json, flag, one_of, option, parsers, real, takes
from dpcore.cli.output import remark, remarks, write_answer
from dpcore.cli.train.run_folder import SELECTION, RunFolder, check_folder, holds, locked
from dpcore.cli.train.settings import KEYWORDS, PRIVACY, RUN, Settings, settings_from, stored_settings
from dpcore.cli.train.train import use_config
from dpcore.errors import ArgumentError, DataError, DivergenceError, DpcoreError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.spec.canonical import plain
from dpcore.spec.validate import nearest
from dpcore.statement.statement import Statement
from dpcore.statement.text import format_epsilon, format_number
from dpcore.tuning import Choice, LogUniform, Outcome, Winner, rehearse, select

Space = dict[str, LogUniform | Choice]

LAWS: dict[str, float | None] = {"geometric": 1.0, "logarithmic": 0.0, "poisson": None}
SEARCH = "Search"
# Settings by which the runs may differ. Those that also decide the event are found when the space is checked.
DRAWN = (*(name for name in KEYWORDS if name not in ("noise_multiplier", "allow_nonprivate")),
    "method", "clip_quantile", "clip_lr", "warmup_steps", "ema")  # fmt: skip
_MOST_CORNERS = 2000
_CHOOSES, _MEASURES = 0, 1


def shape_of(value: Any) -> float | None:
    """Return the shape of a law of the number of runs, from its name or a number."""
    return LAWS[one_of(LAWS)(value)] if str(value)[:1].isalpha() else real(value)


def space_of(texts: Iterable[str]) -> Space:
    """Return the space of texts such as ``lr=0.05:5``, uniform in its logarithm, and ``max-grad-norm=0.5,1,2``."""
    known, space = {name: parsers(Settings)[name] for name in DRAWN}, Space()
    for text in texts:
        key, equals, values = text.partition("=")
        name = key.strip().replace("-", "_")
        if not equals:
            raise ArgumentError(f"space={text!r}: write NAME=LOW:HIGH or NAME=A,B,C, such as lr=0.05:5")
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"these are: {', '.join(sorted(known))}"
            raise ArgumentError(f"space={text!r}: {name!r} is no setting that may be drawn; {hint}")
        if name in space:
            raise ArgumentError(f"space={text!r}: {name!r} is there twice; give all its values at once")
        try:
            space[name] = _drawn(known[name], values)
        except (typer.BadParameter, ArgumentError) as cause:
            raise ArgumentError(f"space={text!r}: {getattr(cause, 'message', cause)}") from cause
    if prod(len({*map(repr, one.values)}) if isinstance(one, Choice) else 2 for one in space.values()) < 2:
        raise ArgumentError(
            "space: has one point; give a range or several values, such as --space lr=0.05:5, or use dpcore train, "
            "which costs less"
        )
    return space


def _drawn(parse: Callable[[Any], Any], values: str) -> LogUniform | Choice:
    low, colon, high = values.partition(":")
    if not colon:
        return Choice(tuple(parse(value.strip()) for value in values.split(",")))
    if parse is not real:
        raise ArgumentError("only real numbers have a range; write values with commas between them")
    return LogUniform(real(low), real(high))


def planned(given: dict[str, Any], space: Space, released: Callable[[Event], Event]) -> tuple[Space, Dataset, Event]:
    """Return the space with all other settings in it, the data, and the event of every run.

    A given epsilon is that of the whole selection. All settings are in the space, so that a selection with other ones
    never continues this one. At each corner of the space a run must have the same event: a setting that decides the
    event decides another one at its other end.
    """
    ends = {k: one.values if isinstance(one, Choice) else (one.low, one.high) for k, one in space.items()}
    if (count := prod(map(len, ends.values()))) > _MOST_CORNERS:
        raise ArgumentError(
            f"space: has {count:,} combinations of values and ends; must have {_MOST_CORNERS:,} at most"
        )
    corners = [dict(zip(ends, values, strict=True)) for values in product(*ends.values())]
    first = settings_from({**given, **corners[0]})
    dataset = datasets.load(*first.source)
    plan = first.plan(len(dataset))
    if first.epsilon is not None:
        plan = plan.calibrated(first.epsilon, first.delta, released=released)
    first = replace(first, epsilon=None, noise_multiplier=plan.noise_multiplier)
    shared = {k: v for k, v in first.to_dict().items() if k not in space and (k in given or k not in DRAWN)}
    shared["noise_multiplier"] = plan.noise_multiplier
    for corner in corners:
        words = ", ".join(f"{name}={value!r}" for name, value in corner.items())
        try:
            event = settings_from({**shared, **corner}).plan(len(dataset)).event
        except DpcoreError as cause:
            raise ArgumentError(f"space: has {words}, which no run can have: {cause}") from cause
        if event != plan.event:
            raise ArgumentError(
                f"space: a run with {words} has another event than one with {corners[0]}; what decides the event must "
                "be the same for all"
            )
    return {**{name: Choice((value,)) for name, value in shared.items()}, **space}, dataset, plan.event


def candidate(settings: Settings, dataset: Dataset) -> Outcome:
    """Make one run, in memory; its result has the model, the evaluations and the statement."""
    import torch

    from dpcore.cli.train.training import Training

    training, chooses, result = Training(settings, dataset.tested_on(_MEASURES)), dataset.tested_on(_CHOOSES), BytesIO()
    ended = training.run(Interruption())
    if ended.diverged:
        raise DivergenceError(f"training diverged: {ended.diverged} no longer finite; lower the rates in --space")
    parts = ended.statement.to_json(), json.dumps(plain(training.evaluations)), training.private.output_state_dict()
    torch.save(parts, result)
    score = training.accuracy(chooses.test_inputs, chooses.test_targets)
    return Outcome(score, result.getvalue(), training.private.plan.event)


def finish(
    folder: RunFolder, winner: Winner, settings: Settings, ledger: Ledger, among: str
) -> tuple[Statement, float]:
    """Write the winner's files, and at last config.json; return the statement and the accuracy."""
    import torch

    from dpcore.cli.train.training import write_model

    content, logged, state = torch.load(BytesIO(winner.result or b""), weights_only=True)
    statement = winner.statement(Statement.from_json(content), ledger)
    # Every evaluation is known by the selection: it costs what all cost.
    evaluations = [{**evaluation, "epsilon": statement.best_epsilon} for evaluation in json.loads(logged)]
    folder.write_metrics(evaluations)
    write_model(folder, statement, settings, state, evaluations, **{"chosen among": among})
    folder.write_config(settings.to_dict(), ledger.path, statement.software)
    return statement, float(evaluations[-1]["test_accuracy"])


def secret_of(folder: Path) -> Path:
    """Return the path of a selection's secret folder: next to the run folder, whose files are all public."""
    whole = folder.resolve()
    return whole.with_name(f"{whole.name}.selection")


def forget(secret: Path) -> None:
    """Delete a selection's secret folder."""
    for name in ("selection.json", ".selection.json.draft", "lock"):  # a killed process leaves the draft
        (secret / name).unlink(missing_ok=True)
    if secret.exists():
        secret.rmdir()


def opened(place: Path, *, overwrite: bool) -> RunFolder:
    """Return the folder of a new selection, or of one that goes on."""
    secret = secret_of(place)
    if holds(place, SELECTION):
        if overwrite:
            with locked(place):  # not while another command makes its runs
                forget(secret)
        elif not secret.exists():
            remark(f"the selection's secret part, {secret}, is missing: it begins again, and is paid again")
        return RunFolder(place, existing=True)
    check_folder(place, overwrite=overwrite)
    if secret.exists():
        raise DataError(
            f"out={str(place)!r}: the secret part of another selection, {secret}, is in this one's place; delete it or "
            "name another folder"
        )
    folder = RunFolder(place, overwrite=overwrite)
    folder.write_json("config.json", {"kind": SELECTION, "format": 1})
    return folder


@takes(Settings, without=("allow_nonprivate", "record_gradients"))
def tune(
    context: typer.Context,
    space: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUES", rich_help_panel=SEARCH,
        help="Draw this setting: from a range, uniform in its logarithm (lr=0.05:5), or from values "
        "(max-grad-norm=0.5,1,2). Once for each setting.")] = None,
    expected_runs: Annotated[float, option(real, "M", "Mean of the secret number of runs.", SEARCH)] = 20.0,
    law: Annotated[Any, option(shape_of, "LAW",
        f"Law of that number: {', '.join(LAWS)}, or the shape of a truncated negative binomial law.",
        SEARCH)] = "geometric",
    public_test_set: Annotated[bool, flag("--public-test-set",
        "Your word that the test set needs no protection: one half chooses the winner, the other measures it.",
        SEARCH)] = False,
    trial: Annotated[bool, flag("--try",
        "Make one run with the test set in the place of the training set, show its errors, and stop.", SEARCH)] = False,
    epsilon: Annotated[Any, option(real, "EPSILON", "Target epsilon of the whole selection.", PRIVACY)] = None,
    ledger: Annotated[Path | None, typer.Option(metavar="FILE", rich_help_panel=PRIVACY,
        help="Ledger that pays for the selection before its first run (dpcore ledger create).")] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", rich_help_panel=RUN,
        help="The winner's run folder; the same command continues where it stopped.")] = Path("tuned"),
    overwrite: Annotated[bool, flag("--overwrite", "Start again in that folder.", RUN)] = False,
    config: Annotated[Path | None, typer.Option(is_eager=True, callback=use_config, metavar="FILE",  # noqa: ARG001 (its callback reads it)
        help="Settings from a .toml file; options win.", rich_help_panel=RUN)] = None,
    as_json: Json = False,
    **given: Any,
) -> int:  # fmt: skip
    """Train with the best of randomly drawn settings, at one guarantee for the whole search."""
    drawn = space_of(space or ())
    if not (trial or public_test_set):
        raise ArgumentError(
            "public_test_set=False: half of the test set chooses the winner, without noise; add --public-test-set if "
            "its examples need no protection and none of them is in the training set"
        )
    if ledger is None and not trial:
        raise ArgumentError("ledger=None: must be given, since a selection is paid for before its first run; make one "
            "with dpcore ledger create FILE")  # fmt: skip
    known = {name: value for name, value in {**given, "epsilon": epsilon}.items()
        if value is not None and getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"}  # fmt: skip
    if twice := sorted(known.keys() & drawn):
        raise ArgumentError(f"{twice[0]}={known[twice[0]]!r}: must not be given with a --space that draws it")
    every, dataset, event = planned(known, drawn, lambda run: PrivateSelection(run, expected_runs, law))
    if trial or ledger is None:
        return _try(every, dataset, event, as_json)
    return run(
        every, dataset, PrivateSelection(event, expected_runs, law), ledger, out, drawn, as_json, overwrite=overwrite
    )


def run(
    every: Space,
    dataset: Dataset,
    event: PrivateSelection,
    ledger: Path,
    out: Path,
    drawn: Space,
    as_json: bool,
    *,
    overwrite: bool,
) -> int:
    """Select a run into a folder; return the exit status."""
    book, shared = Ledger.open(ledger), _settings({name: one.draw() for name, one in every.items()}, dataset)
    folder = _ready(shared, dataset, event, out, overwrite=overwrite)
    among = f"{', '.join(map(_words, drawn.items()))}; {format_number(event.expected_runs)} runs expected"
    remarks().print(
        f"Selecting a run of {shared.model} on {dataset.name} among {among}. Nothing is shown before the end.",
        markup=False,
    )
    with locked(folder.path):
        try:
            winner = select(
                lambda values: candidate(_settings(values, dataset), dataset),
                every,
                event.run,
                folder=secret_of(out),
                ledger=book,
                scored_on="public",
                expected_runs=event.expected_runs,
                shape=event.shape,
                name=f"{dataset.name}, {shared.model}: selection",
            )
        except Stopped as stop:
            raise Stopped(
                "stopped; the run under way counts as the worst of the selection, which the same command continues",
                stop.status,
            ) from stop
        if winner.settings is None:
            raise DpcoreError(
                f"no run succeeded, or none was made: nothing is released, and the ledger paid for the selection; "
                f"look for the reason with --try, and name another folder than {out}"
            )
        settings = _settings(winner.settings, dataset)
        statement, accuracy = finish(folder, winner, settings, book, among)
        forget(secret_of(out))
    remark(winner.remark)
    chosen = {name: winner.settings[name] for name in drawn}
    spent = {"epsilon": statement.best_epsilon, "delta": statement.delta}
    write_answer(
        as_json,
        {"status": "complete", **spent, "chosen": chosen, "test_accuracy": accuracy, "run_folder": str(out),
            "settings": settings.to_dict(), "statement": statement.to_dict()},
        f"chosen             {', '.join(f'{name} = {value}' for name, value in chosen.items())}",
        f"held-out accuracy  {100 * accuracy:.2f}%, on the half of the test set that did not choose",
        f"privacy spent      epsilon = {format_epsilon(spent['epsilon'])} at delta = {format_number(spent['delta'])}, "
        f"{statement.adjacency} adjacency, for the whole selection",
        f"run folder         {out}",
    )  # fmt: skip
    return 0


def _ready(shared: Settings, dataset: Dataset, event: PrivateSelection, out: Path, *, overwrite: bool) -> RunFolder:
    """Return the folder, after all that can be refused before the selection is paid for."""
    if not isfinite(cost := accounting.smallest_epsilon(event, shared.delta)[0]):
        raise ArgumentError(f"noise_multiplier={shared.noise_multiplier!r}: must be above 0, or nothing is guaranteed")
    remark(accounting.delta_remark(shared.delta, len(dataset)))
    from dpcore.cli.train.training import Training

    built = Training(shared, dataset)
    if built.private.plan.event != event.run:
        raise PrivacyError("event: the run's plan has another one than its settings")
    for sentence in built.remarks:
        remark(sentence)
    remarks().print(
        f"All runs together cost epsilon = {format_epsilon(cost)} at delta = {format_number(shared.delta)}, at noise "
        f"multiplier {format_number(shared.noise_multiplier or 0.0)}.",
        markup=False,
    )
    return opened(out, overwrite=overwrite)


def _words(item: tuple[str, LogUniform | Choice]) -> str:
    name, one = item
    return f"{name}={f'{one.low:g}:{one.high:g}' if isinstance(one, LogUniform) else ','.join(map(str, one.values))}"


def _settings(values: dict[str, Any], dataset: Dataset) -> Settings:
    return stored_settings(values).resolved(len(dataset))


def _try(every: Space, dataset: Dataset, event: Event, as_json: bool) -> int:
    """Make one run with examples of the test set in the place of the private ones, and show its errors."""
    places = np.arange(len(dataset)) % len(dataset.test_inputs)
    public = replace(dataset, train_inputs=dataset.test_inputs[places], train_targets=dataset.test_targets[places])
    outcome = rehearse(lambda values: candidate(_settings(values, public), public), every, event)
    write_answer(
        as_json,
        {"status": "rehearsed", "score": outcome.score},
        f"A run succeeded: accuracy {100 * outcome.score:.2f}% on test examples that it was trained on. Nothing was "
        "paid, written or released.",
    )
    return 0
