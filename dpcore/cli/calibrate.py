"""``dpcore calibrate``: what noise a target needs."""

from __future__ import annotations

from typing import Annotated

import typer

from dpcore import accounting
from dpcore.cli import options
from dpcore.cli.epsilon import chosen_accountant
from dpcore.cli.output import write_json, write_line
from dpcore.cli.question import ask
from dpcore.cli.values import real
from dpcore.report.canonical import plain
from dpcore.report.text import format_epsilon, format_number


def calibrate(
    epsilon: Annotated[float, typer.Option(parser=real, metavar="EPSILON", help="The target, for example 3.")],
    delta: options.Delta,
    sample_rate: options.SampleRate = None,
    dataset_size: options.DatasetSize = None,
    batch_size: options.BatchSize = None,
    steps: options.Steps = None,
    epochs: options.Epochs = None,
    sampling: options.Sampling = "poisson",
    accountant: options.Accountant = None,
    as_json: options.Json = False,
    debug: options.Debug = False,  # noqa: ARG001 (read by dpcore.cli.app)
) -> None:
    """Say what noise multiplier meets a target epsilon."""
    question = ask(sampling, sample_rate, dataset_size, batch_size, steps, epochs)
    name = chosen_accountant(question.make_event(1.0), delta, accountant)
    multiplier = accounting.calibrate_noise_multiplier(epsilon, delta, question.make_event, name)
    event = question.make_event(multiplier)
    reached = accounting.epsilon(event, delta, name)
    if as_json:
        write_json(
            {
                "noise_multiplier": multiplier,
                "epsilon": reached,
                "target_epsilon": epsilon,
                "delta": delta,
                "accountant": name,
                "adjacency": str(event.adjacency),
                "event": plain(event.to_dict()),
            }
        )
        return
    write_line(f"noise multiplier = {rounded_up(multiplier)}")
    write_line(f"gives epsilon = {format_epsilon(reached)} at delta = {format_number(delta)}")
    write_line(f"{name} accountant, {event.adjacency} adjacency, {question.words}")


def rounded_up(multiplier: float) -> str:
    """Return the multiplier with six digits, rounded up, so that typing it in again keeps the target."""
    return format_epsilon(multiplier, digits=6)
