"""``dpcore epsilon``: what a plan costs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dpcore import accounting
from dpcore.cli import options
from dpcore.cli.accounting import answer
from dpcore.cli.accounting.event_options import ask
from dpcore.cli.output import write_json, write_line
from dpcore.cli.values import real, reals
from dpcore.spec.canonical import plain
from dpcore.statement.text import format_epsilon, format_number


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
    max_batch_size: options.MaxBatchSize = None,
    groups: options.Groups = None,
    accountant: options.Accountant = None,
    orders: Annotated[
        Any, typer.Option(parser=reals, metavar="A,B,...", help="Orders of the rdp accountant, instead of its own.")
    ] = None,
    show_all: options.AllAccountants = False,
    as_json: options.Json = False,
    debug: options.Debug = False,  # noqa: ARG001 (read by dpcore.cli.app)
) -> None:
    """Say what epsilon a noise multiplier gives."""
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
    name = answer.chosen_accountant(event, delta, "rdp" if orders is not None and accountant is None else accountant)
    value = accounting.epsilon(event, delta, name, orders=orders)
    interval = accounting.epsilon_interval(event, delta) if name == "pld" else None
    table = answer.every_epsilon(event, delta) if show_all or as_json else {}
    remark = answer.remark_on_delta(delta, question, event)
    if as_json:
        write_json(
            {
                "epsilon": plain(value),
                "delta": delta,
                "accountant": name,
                **({} if interval is None else {"interval": plain([interval.lower, interval.upper])}),
                "accountants": plain(table),
                **answer.described(event),
                **({} if remark is None else {"remark": remark}),
            }
        )
        return
    write_line(f"epsilon = {format_epsilon(value)} at delta = {format_number(delta)}")
    write_line(
        f"{name} accountant, {event.adjacency} adjacency, {question.words}, noise multiplier {noise_multiplier:g}"
    )
    if value == float("inf"):
        write_line(answer.INFINITE)
    if interval is not None:
        answer.write_certified(interval.lower, interval.upper, "epsilon")
    if show_all:
        answer.write_table(table)
