"""``dpcore inspect``: filters, and the released gradients of a run, in numbers and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpcore.cli.options import Commands, Json, option, picture
from dpcore.cli.values import count, real

inspect = Commands()  # its words stand in dpcore.cli.app

_Picture = Annotated[
    Path | None,
    typer.Option("--out", parser=picture, metavar="FILE.png", help="Draw a picture there (.png, .pdf, .svg)."),
]


@inspect.callback(invoke_without_command=True)
def _start(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@inspect.command("filter", epilog="Example:  dpcore inspect filter b=0.1 a=-0.9 --out momentum.png")
def filter_command(
    words: Annotated[list[str] | None, typer.Argument(metavar="NAME | b=.. a=.. | kappa=..",
        help="A named filter, coefficients (several with commas), DiSK's kappa or sigma_H=.. sigma_v=.. sigma_w=.. "
        "of its Kalman gain, butterworth or chebyshev; all named filters if left out.",
        show_default=False)] = None,
    order: Annotated[Any, option(count, "N", "Of butterworth and chebyshev: 1, 2 or 3.")] = None,
    cutoff: Annotated[Any, option(real, "F",
        "Of the same: a fraction of the highest frequency, half a cycle a step.")] = None,
    ripple: Annotated[Any, option(real, "DB", "Of chebyshev: its ripple in decibels, 1 if left out.")] = None,
    out: _Picture = None,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Say what a filter does to gradient and noise. Ends with status 2 for a filter that runs refuse."""
    from dpcore.cli.reports.inspect_filter import inspect_filter

    return inspect_filter(words or [], {"order": order, "cutoff": cutoff, "ripple": ripple}, out, as_json)


@inspect.command("gradients", epilog="Example:  dpcore inspect gradients runs/digits-mlp-doppler --out gradients.png")
def gradients_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run folder made with --record-gradients.")],
    out: _Picture = None,
    as_json: Json = False,
) -> None:
    """Show signal and noise in the gradients that a run released, before and after its filter."""
    from dpcore.cli.reports.inspect_gradients import inspect_gradients

    inspect_gradients(folder, out, as_json)
