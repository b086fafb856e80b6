"""The options that say what is trained and how, shared by ``dpcore train`` and ``dpcore compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpcore.cli import options
from dpcore.cli.values import count, groups, one_of, real

MODELS = ("logistic", "mlp", "cnn-5")
CLIPPING = ("standard", "automatic", "automatic_v", "normalized")
DATA, METHOD, PRIVACY, RUN = "Data and model", "Method", "Privacy", "Run"


def methods() -> tuple[str, ...]:
    """Return the names of the methods; asked for only when an option is read, since that imports NumPy."""
    from dpcore.methods import METHODS

    return tuple(METHODS)


def _backends() -> tuple[str, ...]:
    from dpcore.spec.backends import available_backends

    return available_backends()


Data = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="digits (built in), mnist, fashion-mnist, kmnist, idx, npz.", rich_help_panel=DATA
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Where the data's files are.", rich_help_panel=DATA)
]
Model = Annotated[
    str, typer.Option(parser=one_of(MODELS), metavar="NAME", help="logistic, mlp or cnn-5.", rich_help_panel=DATA)
]
Delta = Annotated[float, typer.Option(parser=real, metavar="DELTA", help="Well below 1/n.", rich_help_panel=PRIVACY)]
MaxGradNorm = Annotated[float, typer.Option(parser=real, metavar="C", help="Clip norm.", rich_help_panel=PRIVACY)]
Clipping = Annotated[
    str | None,
    typer.Option(
        parser=one_of(CLIPPING),
        metavar="RULE",
        help="standard, automatic, automatic_v, normalized; if not given: automatic for disk, else standard.",
        rich_help_panel=PRIVACY,
    ),
]
ClippingGroups = Annotated[
    Any,
    typer.Option(
        parser=groups,
        metavar="GROUPS",
        help="flat, per_layer, per_tensor, or norms by pattern: '0.*=0.5,2.*=1'.",
        rich_help_panel=PRIVACY,
    ),
]
Sampling = Annotated[
    str | None,
    typer.Option(
        parser=one_of(options.SAMPLINGS),
        metavar="NAME",
        help=", ".join(options.SAMPLINGS) + "; if not given: fixed-order where the method needs it, else poisson.",
        rich_help_panel=PRIVACY,
    ),
]
MaxBatchSize = Annotated[
    int | None,
    typer.Option(
        parser=count,
        metavar="N",
        help="Of truncated-poisson; by default passed less than once in a million steps.",
        rich_help_panel=PRIVACY,
    ),
]
Groups = Annotated[
    int | None,
    typer.Option(parser=count, metavar="N", help="Of cyclic-poisson: groups that take turns.", rich_help_panel=PRIVACY),
]
Epochs = Annotated[int, typer.Option(parser=count, metavar="N", help="Passes over the data.", rich_help_panel=METHOD)]
BatchSize = Annotated[
    int | None,
    typer.Option(
        parser=count,
        metavar="N",
        help="Expected; if not given, the power of two nearest to 2 sqrt(n).",
        rich_help_panel=METHOD,
    ),
]
Ledger = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Pay for every step from this ledger, and stop before its budget is crossed (dpcore ledger create).",
        rich_help_panel=PRIVACY,
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(parser=one_of(_backends), metavar="NAME", help="numpy (CPU) or triton (CUDA).", rich_help_panel=RUN),
]
