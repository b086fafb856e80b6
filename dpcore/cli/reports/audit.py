"""``dpcore audit``: canaries through the real step, and what they show of epsilon."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from dpcore.cli import options
from dpcore.cli.output import write_json, write_line
from dpcore.cli.train import method_options as own
from dpcore.cli.train import training_options as shared
from dpcore.cli.values import count, one_of, real
from dpcore.errors import ArgumentError
from dpcore.statement.text import format_number


def audit(
    method: Annotated[
        str, typer.Option(parser=one_of(shared.methods), metavar="NAME", help="Any method, such as disk.")
    ] = "dp_sgd",
    base: own.Base = None,
    variant: own.Variant = None,
    strategy: own.Strategy = None,
    bands: own.Bands = None,
    max_grad_norm: shared.MaxGradNorm = 1.0,
    clipping: shared.Clipping = None,
    clipping_groups: shared.ClippingGroups = "flat",
    noise_multiplier: Annotated[
        float | None,
        typer.Option(parser=real, metavar="SIGMA", help="Of the audited run; 2 without it and --epsilon."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(parser=real, metavar="EPSILON", help="Calibrate the noise to this claim instead.")
    ] = None,
    delta: shared.Delta = 1e-5,
    sampling: Annotated[
        str | None,
        typer.Option(
            parser=one_of(options.ACCOUNTED),
            metavar="NAME",
            help=", ".join(options.ACCOUNTED) + "; if not given: fixed-order where the method needs it, else poisson.",
        ),
    ] = None,
    dataset_size: Annotated[int, typer.Option(parser=count, metavar="N", help="Number of examples.")] = 400,
    batch_size: Annotated[int, typer.Option(parser=count, metavar="N", help="Expected batch size.")] = 40,
    steps: Annotated[int, typer.Option(parser=count, metavar="N", help="Number of steps of a run.")] = 10,
    max_batch_size: options.MaxBatchSize = None,
    groups: options.Groups = None,
    canaries: Annotated[
        int, typer.Option(parser=count, metavar="N", help="In each run, at most --dataset-size.")
    ] = 128,
    runs: Annotated[int, typer.Option(parser=count, metavar="N", help="Runs of fresh keys.")] = 32,
    confidence: Annotated[
        float, typer.Option(parser=real, metavar="P", help="1 minus the probability of a false alarm.")
    ] = 0.99,
    as_json: options.Json = False,
    debug: options.Debug = False,  # noqa: ARG001 (read by dpcore.cli.app)
) -> None:
    """Try to refute a method's claimed epsilon; the exit status is 1 where that succeeds."""
    from dpcore.audit import audit as audited
    from dpcore.cli.train.settings import Settings
    from dpcore.plan.plan import Plan

    if epsilon is None and noise_multiplier is None:
        noise_multiplier = 2.0
    settings = Settings(
        method=method,
        base=base,
        variant=variant,
        strategy=strategy,
        bands=bands,
        max_grad_norm=max_grad_norm,
        clipping=clipping,
        clipping_groups=clipping_groups,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        batch_size=batch_size,
    )
    drawn = sampling or settings.sampling or "poisson"
    sampler = make_sampler(drawn, dataset_size, batch_size, max_batch_size, groups)
    # The method divides by what the sampler draws: under full batches, by the data set's size.
    chosen = replace(settings.build_method(dataset_size), batch_size=None)
    if epsilon is not None:
        chosen = Plan(chosen, sampler, steps).calibrated(epsilon, delta).method
    result = audited(chosen, sampler, steps, delta=delta, canaries=canaries, runs=runs, confidence=confidence)
    if as_json:
        write_json({**result.to_dict(), "steps": steps, "sampler": sampler.describe(), "settings": chosen.describe()})
    else:
        _write(result)
    if result.flagged:
        raise typer.Exit(1)


def make_sampler(
    sampling: str, dataset_size: int, batch_size: int, max_batch_size: int | None, groups: int | None
) -> Any:
    """Return the sampler of the options.

    Raises
    ------
    ArgumentError
        Where an option is for another sampling, or missing.
    """
    from dpcore import sampling as samplers

    for name, value, kind in (
        ("max_batch_size", max_batch_size, "truncated-poisson"),
        ("groups", groups, "cyclic-poisson"),
    ):
        if value is not None and sampling != kind:
            raise ArgumentError(f"{name}={value!r}: --{name.replace('_', '-')} is only for --sampling {kind}")
    if sampling == "truncated-poisson":
        return samplers.TruncatedPoissonSampler(
            dataset_size=dataset_size, batch_size=batch_size, max_batch_size=max_batch_size
        )
    if sampling == "cyclic-poisson":
        if groups is None:
            raise ArgumentError("groups: give --groups, the number of groups that take turns")
        return samplers.CyclicPoissonSampler(dataset_size=dataset_size, batch_size=batch_size, groups=groups)
    if sampling == "full-batch":
        return samplers.FixedOrderSampler(dataset_size=dataset_size, batch_size=dataset_size)
    kinds: dict[str, Any] = {
        "poisson": samplers.PoissonSampler,
        "fixed-size": samplers.FixedSizeSampler,
        "fixed-order": samplers.FixedOrderSampler,
        "shuffled": samplers.ShuffledSampler,
    }
    return kinds[sampling](dataset_size=dataset_size, batch_size=batch_size)


def _write(result: Any) -> None:
    write_line(f"claimed:     epsilon = {result.claimed_epsilon:.4g} at delta = {format_number(result.delta)}")
    write_line(f"lower bound: epsilon = {result.lower_bound:.4g} at confidence {result.confidence:g}")
    write_line(f"             (if {result.assumes})")
    write_line(
        f"canaries:    {result.canaries_in} in, {result.canaries_out} out; power at least {result.power:.3g} at a "
        f"false positive rate of at most {result.false_positive_rate:.3g}, where the claim allows "
        f"{result.claimed_power:.3g}"
    )
    write_line(f"noise:       {result.noise_ratio:.4f} of the planned standard deviation, on untouched coordinates")
    if result.flagged:
        write_line("FLAGGED: the run is not what the plan says.")
        for finding in result.findings:
            write_line(f"- {finding}")
    else:
        write_line("Nothing contradicts the claim. That proves no privacy: a lower bound far below the claim shows")
        write_line("nothing, and an error that these canaries do not meet stays unseen.")
