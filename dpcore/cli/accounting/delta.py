"""``dpcore delta``: the delta that goes with an epsilon."""

from __future__ import annotations

from typing import Annotated

import typer

from dpcore import accounting
from dpcore.cli import options
from dpcore.cli.accounting import answer
from dpcore.cli.accounting.event_options import ask
from dpcore.cli.output import write_json, write_line
from dpcore.cli.values import real
from dpcore.spec.canonical import plain
from dpcore.statement.text import format_epsilon, format_number


def delta(
    noise_multiplier: Annotated[
        float,
        typer.Option(
            parser=real, metavar="SIGMA", help="Standard deviation of the noise on the sum over the clip norm."
        ),
    ],
    epsilon: Annotated[float, typer.Option(parser=real, metavar="EPSILON", help="0 or more, for example 3.")],
    sample_rate: options.SampleRate = None,
    dataset_size: options.DatasetSize = None,
    batch_size: options.BatchSize = None,
    steps: options.Steps = None,
    epochs: options.Epochs = None,
    sampling: options.Sampling = "poisson",
    max_batch_size: options.MaxBatchSize = None,
    groups: options.Groups = None,
    accountant: options.Accountant = None,
    show_all: options.AllAccountants = False,
    as_json: options.Json = False,
    debug: options.Debug = False,  # noqa: ARG001 (read by dpcore.cli.app)
) -> None:
    """Say what delta a plan has at an epsilon."""
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
    event = question.event()
    name = answer.tightest_delta(event, epsilon, accountant)
    value = accounting.delta(event, epsilon, name)
    interval = accounting.delta_interval(event, epsilon) if name == "pld" else None
    table = answer.every_delta(event, epsilon) if show_all or as_json else {}
    remark = answer.remark_on_delta(value, question, event) if 0 < value < 1 else None
    if as_json:
        write_json(
            {
                "delta": value,
                "epsilon": epsilon,
                "accountant": name,
                **({} if interval is None else {"interval": plain([interval.lower, interval.upper])}),
                "accountants": plain(table),
                **answer.described(event),
                **({} if remark is None else {"remark": remark}),
            }
        )
        return
    # Where anything was released, an upper bound of 0 is one that a float64 cannot hold.
    underflow = value == 0.0 and accounting.delta(event, 0.0, name) > 0.0
    shown = "below 1e-300" if underflow else format_epsilon(value)
    write_line(f"delta = {shown} at epsilon = {format_number(epsilon)}")
    write_line(
        f"{name} accountant, {event.adjacency} adjacency, {question.words}, noise multiplier {noise_multiplier:g}"
    )
    if value == 1.0:
        write_line("A delta of 1 is no guarantee at all.")
    if interval is not None:
        answer.write_certified(interval.lower, interval.upper, "delta")
    if show_all:
        answer.write_table(table)
