"""Options that several commands share, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpcore.cli.values import count, one_of, real

# What the commands train and compare draw by, and what the accounting commands know.
SAMPLINGS = ("poisson", "truncated-poisson", "fixed-size", "fixed-order", "shuffled", "cyclic-poisson")
ACCOUNTED = (
    *("poisson", "truncated-poisson", "fixed-size", "fixed-order"),
    *("shuffled", "cyclic-poisson", "full-batch"),
)

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
    str,
    typer.Option(parser=one_of(ACCOUNTED), metavar="NAME", help="How batches are drawn: " + ", ".join(ACCOUNTED) + "."),
]
MaxBatchSize = Annotated[
    int | None,
    typer.Option(parser=count, metavar="N", help="Of truncated-poisson; by default passed once in a million steps."),
]
Groups = Annotated[
    int | None, typer.Option(parser=count, metavar="N", help="Of cyclic-poisson: groups that take turns.")
]
NoiseMultiplier = Annotated[
    float | None,
    typer.Option(parser=real, metavar="SIGMA", help="Standard deviation of the noise on the sum over the clip norm."),
]


def _accountants() -> tuple[str, ...]:
    from dpcore import accounting

    return accounting.available_accountants()


Accountant = Annotated[
    str | None,
    typer.Option(
        parser=one_of(_accountants),
        metavar="NAME",
        help="The accountant; the tightest that covers the plan if not given.",
    ),
]
AllAccountants = Annotated[bool, typer.Option("--all", metavar=" ", help="Also show what every other accountant says.")]


def picture(value: Any) -> Path:
    """Return the path of a picture that can be written, checked before anything is computed."""
    path = Path(value)
    if path.suffix.lower() not in (".png", ".pdf", ".svg") or path.is_dir():
        raise typer.BadParameter(f"{str(value)!r} must be a file that ends in .png, .pdf, .svg")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{str(value)!r}: there is no folder {path.parent}")
    return path
