"""``dpcore train``: one model, one method, one guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpcore.cli import options
from dpcore.cli.train import config_file
from dpcore.cli.train import method_options as own
from dpcore.cli.train import resume as resumed
from dpcore.cli.train import training_options as shared
from dpcore.cli.train.run import run
from dpcore.cli.train.settings import SETTINGS, Settings
from dpcore.cli.train.training_options import DATA, METHOD, PRIVACY, RUN, methods
from dpcore.cli.values import count, one_of, real, whole


def train(
    context: typer.Context,
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
    clip_quantile: own.ClipQuantile = None,
    clip_lr: own.ClipLr = None,
    bit_noise: own.BitNoise = None,
    sampling: shared.Sampling = None,
    max_batch_size: shared.MaxBatchSize = None,
    groups: shared.Groups = None,
    method: Annotated[
        str,
        typer.Option(
            parser=one_of(methods),
            metavar="NAME",
            help="dp_sgd, doppler, disk, pmlf, inner_outer, memf, srg_memf, accelerated_srgd, dp_adam, dp_adagrad.",
            rich_help_panel=METHOD,
        ),
    ] = "dp_sgd",
    epochs: shared.Epochs = 10,
    batch_size: shared.BatchSize = None,
    lr: Annotated[
        float | None, typer.Option(parser=real, metavar="RATE", help="Learning rate.", rich_help_panel=METHOD)
    ] = None,
    base: own.Base = None,
    momentum: own.Momentum = None,
    betas: own.Betas = None,
    eps: own.Eps = None,
    weight_decay: own.WeightDecay = None,
    radius: own.Radius = None,
    schedule: own.Schedule = None,
    warmup_steps: own.WarmupSteps = None,
    ema: own.Ema = None,
    kappa: own.Kappa = None,
    gamma: own.Gamma = None,
    filter: own.Filter = None,  # noqa: A002 (the option's name)
    filter_b: own.FilterB = None,
    filter_a: own.FilterA = None,
    bias_corrected: own.BiasCorrected = None,
    window: own.Window = None,
    beta: own.Beta = None,
    outer_momentum: own.OuterMomentum = None,
    variant: own.Variant = None,
    scale_eps: own.ScaleEps = None,
    max_scaled_norm: own.MaxScaledNorm = None,
    unscaled_steps: own.UnscaledSteps = None,
    scaled_steps: own.ScaledSteps = None,
    joint_scale: own.JointScale = None,
    allow_nonprivate: own.AllowNonprivate = None,
    strategy: own.Strategy = None,
    bands: own.Bands = None,
    decay: own.Decay = None,
    backend: shared.Backend = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Run folder; runs/DATA-MODEL-METHOD if not given.", rich_help_panel=RUN),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar=" ", help="Replace the run in that folder.", rich_help_panel=RUN)
    ] = False,
    config: Annotated[
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
    ledger: shared.Ledger = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=resumed.use,
            metavar="FOLDER",
            help="Go on with the run in this folder, which a ledger pays for, from its checkpoint.",
            rich_help_panel=RUN,
        ),
    ] = None,
    record_gradients: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="N",
            help="Keep N coordinates of each released gradient, for dpcore inspect gradients.",
            rich_help_panel=RUN,
        ),
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Train a model with a stated privacy guarantee."""
    # First of all: the arguments are the settings, by the same names.
    given = dict(locals())
    if resume is not None:
        resumed.check(context, resume)
    from dpcore.spec.backends import get_backend

    given = {name: value for name, value in given.items() if name in SETTINGS}
    given["data_dir"] = None if data_dir is None else str(data_dir)
    settings = Settings(**{**given, "backend": backend or get_backend()})
    if resume is not None:
        status = resumed.resume(settings, resume, as_json, ledger)
    else:
        status = run(settings, out, overwrite, as_json, ledger)
    if status:
        raise typer.Exit(status)
