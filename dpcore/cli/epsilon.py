"""``dpcore epsilon``: what a plan costs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dpcore import accounting
from dpcore.cli import options
from dpcore.cli.output import write_json, write_line
from dpcore.cli.question import ask
from dpcore.cli.values import real, reals
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.report.canonical import plain
from dpcore.report.text import format_epsilon, format_number


def epsilon(
    noise_multiplier: Annotated[
        float,
        typer.Option(
            parser=real, metavar="SIGMA", help="Standard deviation of the noise on the sum over the clip norm."
        ),
    ],
    delta: options.Delta,
    sample_rate: options.SampleRate = None,
    dataset_size: options.DatasetSize = None,
    batch_size: options.BatchSize = None,
    steps: options.Steps = None,
    epochs: options.Epochs = None,
    sampling: options.Sampling = "poisson",
    accountant: options.Accountant = None,
    orders: Annotated[
        Any, typer.Option(parser=reals, metavar="A,B,...", help="Orders of the rdp accountant, instead of its own.")
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,  # noqa: ARG001 (read by dpcore.cli.app)
) -> None:
    """Say what epsilon a noise multiplier gives."""
    question = ask(sampling, sample_rate, dataset_size, batch_size, steps, epochs)
    event = question.make_event(noise_multiplier)
    name = chosen_accountant(event, delta, accountant)
    value = accounting.epsilon(event, delta, name, orders=orders)
    if as_json:
        write_json(
            {
                "epsilon": plain(value),
                "delta": delta,
                "accountant": name,
                "adjacency": str(event.adjacency),
                "event": plain(event.to_dict()),
            }
        )
        return
    write_line(f"epsilon = {format_epsilon(value)} at delta = {format_number(delta)}")
    write_line(
        f"{name} accountant, {event.adjacency} adjacency, {question.words}, noise multiplier {noise_multiplier:g}"
    )
    if value == float("inf"):
        write_line("Infinite: there is no guarantee at all.")


def chosen_accountant(event: accounting.Event, delta: float, asked: str | None) -> str:
    """Return the accountant asked for, or the one with the smallest epsilon: each gives an upper bound.

    Raises
    ------
    ArgumentError, PrivacyError
        Where the accountant does not exist yet, or none covers the event.
    """
    if asked == "pld" and asked not in accounting.available_accountants():
        raise ArgumentError("accountant='pld': has not landed in this version; use --accountant rdp")
    if asked is not None:
        return asked
    names = accounting.accountants_for(event)
    if not names:
        raise PrivacyError(f"event={type(event).__name__}: no accountant of this version covers it")
    return min(names, key=lambda name: accounting.epsilon(event, delta, name))
