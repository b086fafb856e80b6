"""``dpcore train``: one model, one method, one guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpcore.cli import config_file, options
from dpcore.cli.run import run
from dpcore.cli.settings import Settings
from dpcore.cli.values import count, groups, one_of, real, reals, whole

MODELS = ("logistic", "mlp", "cnn-5")


def _methods() -> tuple[str, ...]:
    from dpcore.methods import METHODS

    return tuple(METHODS)


def _bases() -> tuple[str, ...]:
    from dpcore.methods import BASES

    return tuple(BASES)


def _filters() -> tuple[str, ...]:
    from dpcore.filters import NAMED_FILTERS

    return tuple(NAMED_FILTERS)


def _backends() -> tuple[str, ...]:
    from dpcore.config import available_backends

    return available_backends()


_DATA, _METHOD, _PRIVACY, _RUN = "Data and model", "Method", "Privacy", "Run"


def train(
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="digits (built in), mnist, fashion-mnist, kmnist, idx, npz.", rich_help_panel=_DATA
        ),
    ] = "digits",
    data_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the data's files are.", rich_help_panel=_DATA)
    ] = None,
    model: Annotated[
        str, typer.Option(parser=one_of(MODELS), metavar="NAME", help="logistic, mlp or cnn-5.", rich_help_panel=_DATA)
    ] = "logistic",
    seed: Annotated[
        int,
        typer.Option(
            parser=whole, metavar="N", help="Of the initial weights; never of the noise.", rich_help_panel=_DATA
        ),
    ] = 0,
    epsilon: Annotated[
        float | None,
        typer.Option(
            parser=real, metavar="EPSILON", help="Target; the noise is calibrated to it.", rich_help_panel=_PRIVACY
        ),
    ] = None,
    delta: Annotated[
        float, typer.Option(parser=real, metavar="DELTA", help="Well below 1/n.", rich_help_panel=_PRIVACY)
    ] = 1e-5,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(parser=real, metavar="SIGMA", help="Instead of --epsilon.", rich_help_panel=_PRIVACY),
    ] = None,
    max_grad_norm: Annotated[
        float, typer.Option(parser=real, metavar="C", help="Clip norm.", rich_help_panel=_PRIVACY)
    ] = 1.0,
    clipping: Annotated[
        str | None,
        typer.Option(
            parser=one_of(("standard", "automatic", "automatic_v", "normalized")),
            metavar="RULE",
            help="standard, automatic, automatic_v, normalized; if not given: automatic for disk, else standard.",
            rich_help_panel=_PRIVACY,
        ),
    ] = None,
    clipping_groups: Annotated[
        Any,
        typer.Option(
            parser=groups,
            metavar="GROUPS",
            help="flat, per_layer, per_tensor, or norms by pattern: '0.*=0.5,2.*=1'.",
            rich_help_panel=_PRIVACY,
        ),
    ] = "flat",
    sampling: Annotated[
        str,
        typer.Option(
            parser=one_of(options.SAMPLINGS), metavar="NAME", help="poisson or fixed-order.", rich_help_panel=_PRIVACY
        ),
    ] = "poisson",
    method: Annotated[
        str,
        typer.Option(
            parser=one_of(_methods), metavar="NAME", help="dp_sgd, doppler, disk, dp_adam.", rich_help_panel=_METHOD
        ),
    ] = "dp_sgd",
    epochs: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Passes over the data.", rich_help_panel=_METHOD)
    ] = 10,
    batch_size: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="N",
            help="Expected; if not given, the power of two nearest to 2 sqrt(n).",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(parser=real, metavar="RATE", help="Learning rate.", rich_help_panel=_METHOD)
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            parser=one_of(_bases),
            metavar="NAME",
            help="Update beneath dp_sgd, doppler, disk: sgd, momentum, adam, adamw.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(parser=real, metavar="M", help="For --base momentum.", rich_help_panel=_METHOD)
    ] = None,
    betas: Annotated[
        Any,
        typer.Option(
            parser=reals, metavar="B1,B2", help="For adam and adamw, such as 0.9,0.999.", rich_help_panel=_METHOD
        ),
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(parser=real, metavar="W", help="Weight decay.", rich_help_panel=_METHOD)
    ] = None,
    kappa: Annotated[
        float | None,
        typer.Option(parser=real, metavar="K", help="disk: weight of the new gradient.", rich_help_panel=_METHOD),
    ] = None,
    gamma: Annotated[
        float | None,
        typer.Option(
            parser=real, metavar="G", help="disk: how far along the last step to look.", rich_help_panel=_METHOD
        ),
    ] = None,
    filter_name: Annotated[
        str | None,
        typer.Option(
            "--filter",
            parser=one_of(_filters),
            metavar="NAME",
            help="doppler: such as 'first-order v1'.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    filter_b: Annotated[
        Any, typer.Option(parser=reals, metavar="B0,B1,...", help="doppler: own coefficients.", rich_help_panel=_METHOD)
    ] = None,
    filter_a: Annotated[
        Any, typer.Option(parser=reals, metavar="A1,A2,...", help="doppler: own coefficients.", rich_help_panel=_METHOD)
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            parser=one_of(_backends), metavar="NAME", help="numpy (CPU) or triton (CUDA).", rich_help_panel=_RUN
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Run folder; runs/DATA-MODEL-METHOD if not given.", rich_help_panel=_RUN),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar=" ", help="Replace the run in that folder.", rich_help_panel=_RUN)
    ] = False,
    config: Annotated[  # noqa: ARG001 (its callback has made it the defaults of the others)
        Path | None,
        typer.Option(
            is_eager=True,
            callback=config_file.use,
            metavar="FILE",
            help="Settings from a .toml file, or from a run's config.json; options win.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", metavar=" ", help="Also write TensorBoard events.", rich_help_panel=_RUN)
    ] = False,
    as_json: options.Json = False,
    debug: options.Debug = False,  # noqa: ARG001 (read by dpcore.cli.app)
) -> None:
    """Train a model with a stated privacy guarantee."""
    from dpcore.config import get_backend

    settings = Settings(
        data=data,
        data_dir=None if data_dir is None else str(data_dir),
        model=model,
        method=method,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        base=base,
        momentum=momentum,
        betas=betas,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        clipping=clipping,
        clipping_groups=clipping_groups,
        kappa=kappa,
        gamma=gamma,
        filter=filter_name,
        filter_b=filter_b,
        filter_a=filter_a,
        sampling=sampling,
        backend=backend or get_backend(),
        seed=seed,
        tensorboard=tensorboard,
    )
    status = run(settings, out, overwrite, as_json)
    if status:
        raise typer.Exit(status)
