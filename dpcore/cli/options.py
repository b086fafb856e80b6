"""Options that several commands share, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpcore.cli.values import count, one_of, real

SAMPLINGS = ("poisson", "fixed-order")

Json = Annotated[
    bool, typer.Option("--json", metavar=" ", help="Print one JSON object on standard output, nothing else there.")
]
Debug = Annotated[bool, typer.Option("--debug", metavar=" ", help="Show the traceback of an error.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Folder for the results.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", metavar=" ", help="Replace the results of an earlier run in the folder.")
]

SampleRate = Annotated[
    float | None,
    typer.Option(
        parser=real, metavar="RATE", help="Probability that an example enters a step, such as 0.01 or 256/60000."
    ),
]
DatasetSize = Annotated[
    int | None, typer.Option(parser=count, metavar="N", help="Number of examples; with --batch-size instead of a rate.")
]
BatchSize = Annotated[
    int | None, typer.Option(parser=count, metavar="N", help="Expected number of examples in a batch.")
]
Steps = Annotated[int | None, typer.Option(parser=count, metavar="N", help="Number of optimizer steps.")]
Epochs = Annotated[
    float | None, typer.Option(parser=real, metavar="N", help="Passes over the data, instead of --steps.")
]
Delta = Annotated[float, typer.Option(parser=real, metavar="DELTA", help="Well below 1/N; for example 1e-5.")]
Sampling = Annotated[
    str, typer.Option(parser=one_of(SAMPLINGS), metavar="NAME", help="How batches are drawn: poisson or fixed-order.")
]


def _accountants() -> tuple[str, ...]:
    from dpcore import accounting

    return (*accounting.available_accountants(), "pld")


Accountant = Annotated[
    str | None,
    typer.Option(
        parser=one_of(_accountants),
        metavar="NAME",
        help="The accountant; the tightest that covers the plan if not given.",
    ),
]
