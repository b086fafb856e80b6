"""``dpcore train``: one model, one method, one guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpcore.cli import config_file, options
from dpcore.cli import training_options as shared
from dpcore.cli.run import run
from dpcore.cli.settings import Settings
from dpcore.cli.training_options import DATA, METHOD, PRIVACY, RUN, methods
from dpcore.cli.values import one_of, real, reals, whole


def _bases() -> tuple[str, ...]:
    from dpcore.methods import BASES

    return tuple(BASES)


def _filters() -> tuple[str, ...]:
    from dpcore.filters import NAMED_FILTERS

    return tuple(NAMED_FILTERS)


def train(
    data: shared.Data = "digits",
    data_dir: shared.DataDir = None,
    model: shared.Model = "logistic",
    seed: Annotated[
        int,
        typer.Option(
            parser=whole, metavar="N", help="Of the initial weights; never of the noise.", rich_help_panel=DATA
        ),
    ] = 0,
    epsilon: Annotated[
        float | None,
        typer.Option(
            parser=real, metavar="EPSILON", help="Target; the noise is calibrated to it.", rich_help_panel=PRIVACY
        ),
    ] = None,
    delta: shared.Delta = 1e-5,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(parser=real, metavar="SIGMA", help="Instead of --epsilon.", rich_help_panel=PRIVACY),
    ] = None,
    max_grad_norm: shared.MaxGradNorm = 1.0,
    clipping: shared.Clipping = None,
    clipping_groups: shared.ClippingGroups = "flat",
    sampling: shared.Sampling = "poisson",
    method: Annotated[
        str,
        typer.Option(
            parser=one_of(methods), metavar="NAME", help="dp_sgd, doppler, disk, dp_adam.", rich_help_panel=METHOD
        ),
    ] = "dp_sgd",
    epochs: shared.Epochs = 10,
    batch_size: shared.BatchSize = None,
    lr: Annotated[
        float | None, typer.Option(parser=real, metavar="RATE", help="Learning rate.", rich_help_panel=METHOD)
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            parser=one_of(_bases),
            metavar="NAME",
            help="Update beneath dp_sgd, doppler, disk: sgd, momentum, adam, adamw.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(parser=real, metavar="M", help="For --base momentum.", rich_help_panel=METHOD)
    ] = None,
    betas: Annotated[
        Any,
        typer.Option(
            parser=reals, metavar="B1,B2", help="For adam and adamw, such as 0.9,0.999.", rich_help_panel=METHOD
        ),
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(parser=real, metavar="W", help="Weight decay.", rich_help_panel=METHOD)
    ] = None,
    kappa: Annotated[
        float | None,
        typer.Option(parser=real, metavar="K", help="disk: weight of the new gradient.", rich_help_panel=METHOD),
    ] = None,
    gamma: Annotated[
        float | None,
        typer.Option(
            parser=real, metavar="G", help="disk: how far along the last step to look.", rich_help_panel=METHOD
        ),
    ] = None,
    filter_name: Annotated[
        str | None,
        typer.Option(
            "--filter",
            parser=one_of(_filters),
            metavar="NAME",
            help="doppler: such as 'first-order v1'.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    filter_b: Annotated[
        Any, typer.Option(parser=reals, metavar="B0,B1,...", help="doppler: own coefficients.", rich_help_panel=METHOD)
    ] = None,
    filter_a: Annotated[
        Any, typer.Option(parser=reals, metavar="A1,A2,...", help="doppler: own coefficients.", rich_help_panel=METHOD)
    ] = None,
    backend: shared.Backend = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Run folder; runs/DATA-MODEL-METHOD if not given.", rich_help_panel=RUN),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar=" ", help="Replace the run in that folder.", rich_help_panel=RUN)
    ] = False,
    config: Annotated[  # noqa: ARG001 (its callback has made it the defaults of the others)
        Path | None,
        typer.Option(
            is_eager=True,
            callback=config_file.use,
            metavar="FILE",
            help="Settings from a .toml file, or from a run's config.json; options win.",
            rich_help_panel=RUN,
        ),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", metavar=" ", help="Also write TensorBoard events.", rich_help_panel=RUN)
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
