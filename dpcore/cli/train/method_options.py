"""The options that not every method takes; which takes which is said in `dpcore.cli.train.settings`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dpcore.cli.train.training_options import METHOD, PRIVACY
from dpcore.cli.values import count, one_of, real, reals

UPDATE, CORRELATED, SCALED = "Update", "Correlated noise", "Scaled gradients (dp_adam, dp_adagrad)"


def bases() -> tuple[str, ...]:
    """Return the names of the updates."""
    from dpcore.methods import BASES

    return tuple(BASES)


def _filters() -> tuple[str, ...]:
    from dpcore.stages.filters import NAMED_FILTERS

    return tuple(NAMED_FILTERS)


def _strategies() -> tuple[str, ...]:
    from dpcore.stages.strategies import NAMES

    return NAMES


def _variants() -> tuple[str, ...]:
    from dpcore.methods import VARIANTS
    from dpcore.stages.updates.accelerated import COUPLINGS

    return (*VARIANTS, *COUPLINGS)


def _number(metavar: str, words: str, panel: str = METHOD) -> Any:
    return typer.Option(parser=real, metavar=metavar, help=words, rich_help_panel=panel)


def _whole(words: str, panel: str = METHOD) -> Any:
    return typer.Option(parser=count, metavar="N", help=words, rich_help_panel=panel)


Base = Annotated[
    str | None,
    typer.Option(
        parser=one_of(bases),
        metavar="NAME",
        help="Update beneath the method: sgd, momentum, nesterov, adam, adamw, adagrad.",
        rich_help_panel=UPDATE,
    ),
]
Momentum = Annotated[float | None, _number("M", "For --base momentum and nesterov.", UPDATE)]
Betas = Annotated[
    Any,
    typer.Option(parser=reals, metavar="B1,B2", help="For adam and adamw, such as 0.9,0.999.", rich_help_panel=UPDATE),
]
Eps = Annotated[float | None, _number("E", "Of the denominator of adam, adamw, adagrad.", UPDATE)]
WeightDecay = Annotated[float | None, _number("W", "Weight decay.", UPDATE)]
Radius = Annotated[float | None, _number("R", "Keep the parameters in this ball around 0.", UPDATE)]
Schedule = Annotated[
    str | None,
    typer.Option(
        parser=one_of(("cosine",)),
        metavar="NAME",
        help="Of the learning rate: cosine, down to 0 at the last step.",
        rich_help_panel=UPDATE,
    ),
]
WarmupSteps = Annotated[int | None, _whole("For --schedule: steps of linear warm-up.", UPDATE)]
Ema = Annotated[
    float | None, _number("DECAY", "Average of the parameters over time; it is evaluated and kept.", UPDATE)
]

ClipQuantile = Annotated[
    float | None,
    _number("Q", "Let the clip norm follow this quantile of the norms; --max-grad-norm is the first one.", PRIVACY),
]
ClipLr = Annotated[float | None, _number("RATE", "For --clip-quantile: how fast; 0.2 if not given.", PRIVACY)]
BitNoise = Annotated[
    float | None,
    _number("STD", "For --clip-quantile: noise on the count, in examples; batch size / 20 if not given.", PRIVACY),
]

Kappa = Annotated[float | None, _number("K", "disk: weight of the new gradient.")]
Gamma = Annotated[float | None, _number("G", "disk: how far along the last step to look.")]
Filter = Annotated[
    str | None,
    typer.Option(
        parser=one_of(_filters),
        metavar="NAME",
        help="doppler, pmlf, disk: such as 'first-order v1'.",
        rich_help_panel=METHOD,
    ),
]
FilterB = Annotated[
    Any,
    typer.Option(parser=reals, metavar="B0,B1,...", help="doppler, pmlf: own coefficients.", rich_help_panel=METHOD),
]
FilterA = Annotated[
    Any,
    typer.Option(parser=reals, metavar="A1,A2,...", help="doppler, pmlf: own coefficients.", rich_help_panel=METHOD),
]
BiasCorrected = Annotated[
    bool | None,
    typer.Option(
        "--bias-corrected",
        metavar=" ",
        help="doppler over adam: take the noise's share off the second moment.",
        rich_help_panel=METHOD,
    ),
]
Window = Annotated[int | None, _whole("pmlf, inner_outer: how many parameter points.")]
Beta = Annotated[float | None, _number("B", "pmlf, inner_outer: decay of the points' weights.")]
OuterMomentum = Annotated[float | None, _number("M", "inner_outer: momentum.")]
Variant = Annotated[
    str | None,
    typer.Option(
        parser=one_of(_variants),
        metavar="NAME",
        help="dp_adam, dp_adagrad: such as scale_then_privatize; accelerated_srgd: such as unaccelerated.",
        rich_help_panel=METHOD,
    ),
]
AllowNonprivate = Annotated[
    bool | None,
    typer.Option(
        "--allow-nonprivate",
        metavar=" ",
        help="For the variant noiseless_preconditioner, which guarantees nothing.",
        rich_help_panel=PRIVACY,
    ),
]

Strategy = Annotated[
    str | None,
    typer.Option(
        parser=one_of(_strategies),
        metavar="NAME",
        help="identity, tree, tree-optimal, square-root, banded-inverse-square-root; needs --sampling fixed-order or "
        "shuffled.",
        rich_help_panel=CORRELATED,
    ),
]
Bands = Annotated[int | None, _whole("Of the banded strategy.", CORRELATED)]
Decay = Annotated[float | None, _number("C", "srg_memf: decay of the earlier gradient.", CORRELATED)]

ScaleEps = Annotated[float | None, _number("E", "Added to the root of the second moment.", SCALED)]
MaxScaledNorm = Annotated[float | None, _number("C", "Clip norm of scaled gradients.", SCALED)]
UnscaledSteps = Annotated[int | None, _whole("delayed_preconditioner: steps without scale in a cycle.", SCALED)]
ScaledSteps = Annotated[int | None, _whole("delayed_preconditioner: steps with a frozen scale.", SCALED)]
JointScale = Annotated[float | None, _number("K", "joint_moments: scale of the square.", SCALED)]
