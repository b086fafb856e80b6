"""``dpcore calibrate``: the one setting of a plan that is not known yet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpcore import accounting
from dpcore.accounting import Event
from dpcore.cli import options
from dpcore.cli.accounting import answer
from dpcore.cli.accounting.event_options import Question, ask
from dpcore.cli.accounting.ledger_left import Spent, spent_of
from dpcore.cli.output import write_json, write_line
from dpcore.cli.values import one_of, real
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.statement.text import format_epsilon, format_lower, format_number

UNKNOWNS = ("noise-multiplier", "steps", "sample-rate", "batch-size", "delta")


def calibrate(
    epsilon: Annotated[
        float | None, typer.Option(parser=real, metavar="EPSILON", help="The target, for example 3.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(parser=real, metavar="DELTA", help="Well below 1/N; for example 1e-5.")
    ] = None,
    noise_multiplier: options.NoiseMultiplier = None,
    sample_rate: options.SampleRate = None,
    dataset_size: options.DatasetSize = None,
    batch_size: options.BatchSize = None,
    steps: options.Steps = None,
    epochs: options.Epochs = None,
    sampling: options.Sampling = "poisson",
    max_batch_size: options.MaxBatchSize = None,
    groups: options.Groups = None,
    solve_for: Annotated[
        str | None,
        typer.Option(
            parser=one_of(UNKNOWNS), metavar="NAME", help=f"What is unknown: {', '.join(UNKNOWNS)}. Or leave it out."
        ),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What this ledger leaves: the target is for its runs and this one together."),
    ] = None,
    accountant: options.Accountant = None,
    as_json: options.Json = False,
    debug: options.Debug = False,  # noqa: ARG001 (read by dpcore.cli.app)
) -> None:
    """Say what meets a target epsilon: the noise, the steps, the batch size or the delta, whichever is left out."""
    question = ask(
        sampling=sampling,
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        dataset_size=dataset_size,
        batch_size=batch_size,
        steps=steps,
        epochs=epochs,
        max_batch_size=max_batch_size,
        groups=groups,
    )
    spent = None if ledger is None else spent_of(ledger)
    if spent is not None:
        epsilon, delta = spent.target(epsilon, delta)
    unknown = _unknown(question, delta, solve_for)
    if epsilon is None:
        raise ArgumentError("epsilon: give the target, as --epsilon 3; dpcore epsilon says what a complete plan costs")
    if unknown == "delta":
        event = _together(spent, question.event())
        name = answer.tightest_delta(event, epsilon, accountant)
        value: float = accounting.delta(event, epsilon, name)
        known, reached, delta = question, epsilon, value
    else:
        assert delta is not None
        value, name = _solve(question, unknown, epsilon, delta, accountant, spent)
        known = question.with_(unknown.replace("-", "_"), value)
        event = _together(spent, known.event())
        reached = accounting.epsilon(event, delta, name)
    remark = answer.remark_on_delta(delta, question, event) if 0 < delta < 1 else None
    granted = None if spent is None else _granted(spent, question, unknown, value)
    if as_json:
        write_json(
            {
                unknown.replace("-", "_"): value,
                "unknown": unknown,
                "epsilon": reached,
                "target_epsilon": epsilon,
                "delta": delta,
                "accountant": name,
                **answer.described(event),
                **({} if spent is None else {"ledger": spent.to_dict(granted)}),
                **({} if remark is None else {"remark": remark}),
            }
        )
        return
    write_line(f"{unknown.replace('-', ' ')} = {_safe(unknown, value)}")
    if value == 0:
        write_line(f"Not even one step meets epsilon = {format_epsilon(epsilon)}: more noise is needed.")
        return
    write_line(f"gives epsilon = {format_epsilon(reached)} at delta = {_delta(unknown, delta)}")
    noise = "" if unknown == "noise-multiplier" else f", noise multiplier {known.noise_multiplier:g}"
    write_line(f"{name} accountant, {event.adjacency} adjacency, {known.words}{noise}")
    if unknown == "steps":
        _tell_epochs(int(value), known)
    if spent is not None:
        for line in spent.words(unknown, value, granted):
            write_line(line)


def _granted(spent: Spent, question: Question, unknown: str, value: float) -> float | None:
    """Return what the ledger itself pays for, of what was found."""
    if value == 0 and unknown == "steps":
        return None

    def make_event(found: float) -> Event:
        return (question if unknown == "delta" else question.with_(unknown.replace("-", "_"), found)).event()

    return spent.pays_for(unknown, value, make_event)


def _tell_epochs(steps: int, known: Question) -> None:
    """Say how many passes over the data so many steps are."""
    epoch = known.steps_per_epoch
    if epoch is None or epoch == 1:
        return
    whole, more = divmod(steps, epoch)
    write_line(f"{steps:,} steps: {whole:,} epochs of {epoch:,} steps" + (f", and {more:,} more" if more else ""))


def _unknown(question: Question, delta: float | None, asked: str | None) -> str:
    """Return the one thing that was left out; with --solve-for, see that it was, and nothing else."""
    open_ = []
    if question.noise_multiplier is None:
        open_.append("noise-multiplier")
    if question.steps is None and question.epochs is None:
        open_.append("steps")
    rateless = question.sampling == "full-batch" or (
        question.sampling in ("fixed-order", "shuffled") and question.dataset_size is None
    )
    if question.sample_rate is None and question.batch_size is None and not rateless:
        open_.append("sample-rate" if question.dataset_size is None else "batch-size")
    if delta is None:
        open_.append("delta")
    if asked in ("sample-rate", "batch-size") and asked not in open_:
        rival = "batch-size" if asked == "sample-rate" else "sample-rate"
        if rival in open_ and asked == "batch-size":
            raise ArgumentError("dataset_size: give --dataset-size, or solve for the sample-rate")
        if rival in open_ and question.sampling == "poisson":
            open_[open_.index(rival)] = asked
    if asked is not None and asked not in open_:
        raise ArgumentError(f"solve_for={asked!r}: was given as an option already; leave that option out")
    if len(open_) != 1:
        raise ArgumentError(_how_many_are_open(open_))
    if open_ == ["sample-rate"] and question.sampling not in ("poisson", "truncated-poisson"):
        raise ArgumentError("dataset_size: give --dataset-size, and the batch size is looked for")
    if open_ == ["sample-rate"] and question.epochs is not None and question.dataset_size is None:
        raise ArgumentError("epochs: give --steps to look for a sample rate; an epoch has 1/rate steps")
    return open_[0]


def _how_many_are_open(open_: list[str]) -> str:
    asked = f"solve_for: exactly one of {', '.join(UNKNOWNS)} must be left out, and "
    if not open_:
        return f"{asked}none is; dpcore epsilon says what a complete plan costs"
    give = {
        "noise-multiplier": "--noise-multiplier",
        "steps": "--steps or --epochs",
        "sample-rate": "--sample-rate, or --dataset-size with --batch-size",
        "batch-size": "--batch-size",
        "delta": "--delta",
    }
    # Most people look for the noise; without it among them, for the first.
    wanted = open_[0].replace("-", " ")
    rest = "; ".join(give[name] for name in open_[1:])
    return f"{asked}these are: {', '.join(open_)}. For the {wanted}, give {rest}"


def _solve(
    question: Question, unknown: str, epsilon: float, delta: float, accountant: str | None, spent: Spent | None
) -> tuple[float, str]:
    """Return the value and the accountant that allows most: each epsilon is an upper bound."""
    before = None if spent is None else spent.event
    name = unknown.replace("-", "_")
    probe = {"noise_multiplier": 1.0, "steps": 1, "sample_rate": 0.01, "batch_size": 1}[name]

    def make_event(value: Any) -> Event:
        return question.with_(name, value).event()

    names = [accountant] if accountant else accounting.accountants_for(_together(spent, make_event(probe)))
    found: list[tuple[float, str]] = []
    refusals: list[Exception] = []
    for candidate in names or ["rdp"]:
        try:
            if unknown == "noise-multiplier":
                value: float = accounting.calibrate_noise_multiplier(
                    epsilon, delta, make_event, candidate, spent=before
                )
            elif unknown == "steps":
                value = accounting.calibrate_steps(epsilon, delta, make_event, candidate, spent=before)
            elif unknown == "sample-rate":
                value = accounting.calibrate_sample_rate(epsilon, delta, make_event, candidate, spent=before)
            else:
                size = question.dataset_size or 1
                value = accounting.calibrate_batch_size(epsilon, delta, make_event, size, candidate, spent=before)
            found.append((value, candidate))
        except (ArgumentError, PrivacyError) as refusal:  # another accountant may certify the target
            refusals.append(refusal)
    if not found:
        raise refusals[0]
    # Of equal values the first, whose accountant comes first in a statement.
    best = min if unknown == "noise-multiplier" else max
    return best(found, key=lambda pair: pair[0])


def _together(spent: Spent | None, event: Event) -> Event:
    return event if spent is None else accounting.Composed((*spent.event.events, event))


def _safe(unknown: str, value: float) -> str:
    """Return the value so rounded that typing it in again keeps the target."""
    if unknown in ("steps", "batch-size"):
        return f"{int(value)}"
    if unknown == "sample-rate":
        return format_lower(value, digits=6)
    return rounded_up(value)


def _delta(unknown: str, delta: float) -> str:
    return rounded_up(delta) if unknown == "delta" else format_number(delta)


def rounded_up(multiplier: float) -> str:
    """Return the multiplier with six digits, rounded up, so that typing it in again keeps the target."""
    return format_epsilon(multiplier, digits=6)
