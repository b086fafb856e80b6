"""``dpcore audit``: canaries through the real step, and what they show of epsilon."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dpcore.cli.accounting.event_options import EventOptions
from dpcore.cli.options import ACCOUNTED, Json, option, takes
from dpcore.cli.output import write_answer
from dpcore.cli.reports.doctor import Arguments
from dpcore.cli.reports.own_run import own_run
from dpcore.cli.train.settings import SETTINGS, Settings, settings_from
from dpcore.cli.values import count, multiplier, one_of, real
from dpcore.statement.text import format_number

_OWN = ("method", "base", "variant", "strategy", "bands", "max_grad_norm", "clipping", "clipping_groups", "delta")


@takes(Settings, without=[name for name in SETTINGS if name not in _OWN])
def audit(
    place: Annotated[str | None, typer.Argument(metavar="FILE[:FUNCTION]", show_default=False,
        help="A script that calls make_private, or a function that returns model, data, method and loss: canaries then "
        "go through this run's own step, and of the options only --confidence, --seconds and --json count.")] = None,
    arguments: Arguments = None,
    noise_multiplier: Annotated[float | None, option(multiplier, "SIGMA",
        "Of the audited run; 2 without it and --epsilon.")] = None,
    epsilon: Annotated[float | None, option(real, "EPSILON", "Calibrate the noise to this claim instead.")] = None,
    sampling: Annotated[str | None, option(one_of(ACCOUNTED), "NAME",
        ", ".join(ACCOUNTED) + "; if not given: fixed-order where the method needs it, else poisson.")] = None,
    dataset_size: Annotated[int, option(count, "N", "Number of examples.")] = 400,
    batch_size: Annotated[int, option(count, "N", "Expected batch size.")] = 40,
    steps: Annotated[int, option(count, "N", "Number of steps of a run.")] = 10,
    max_batch_size: Annotated[int | None, option(count, "N", "Of truncated-poisson.")] = None,
    groups: Annotated[int | None, option(count, "N", "Of cyclic-poisson: groups that take turns.")] = None,
    canaries: Annotated[int, option(count, "N", "In each run, at most --dataset-size.")] = 128,
    runs: Annotated[int, option(count, "N", "Runs of fresh keys.")] = 32,
    confidence: Annotated[float, option(real, "P", "1 minus the probability of a false alarm.")] = 0.99,
    seconds: Annotated[float, option(real, "SECONDS", "Of FILE: at most about so many.")] = 60.0,
    as_json: Json = False,
    **given: Any,
) -> int:  # fmt: skip
    """Try to refute a method's claimed epsilon; the exit status is 1 where that succeeds."""
    from dpcore.audit import audit as audited
    from dpcore.plan.plan import Plan

    if place is not None:
        with own_run(place, arguments or []) as run:
            from dpcore.torch import audit as audit_run

            known = {name: value for name, value in run.items() if name != "optimizer"}
            own = audit_run(**known, confidence=confidence, seconds=seconds)
        write_answer(as_json, own.to_dict(), str(own))
        return 1 if own.flagged else 0
    if epsilon is None and noise_multiplier is None:
        noise_multiplier = 2.0
    settings = settings_from({**given, "epsilon": epsilon, "noise_multiplier": noise_multiplier})
    drawn = sampling or settings.sampling or "poisson"
    if drawn == "full-batch":
        drawn, batch_size = "fixed-order", dataset_size
    sampler: Any = EventOptions(
        sampling=drawn, dataset_size=dataset_size, batch_size=batch_size, max_batch_size=max_batch_size, groups=groups
    ).sampler()
    # It divides by what the sampler draws: under full batches, by the data set's size.
    chosen = settings.build_method()
    if epsilon is not None:
        chosen = Plan(chosen, sampler, steps).calibrated(epsilon, settings.delta).method
    result = audited(chosen, sampler, steps, delta=settings.delta, canaries=canaries, runs=runs, confidence=confidence)
    told = {**result.to_dict(), "steps": steps, "sampler": sampler.describe(), "settings": chosen.describe()}
    end = [
        "Nothing contradicts the claim. That proves no privacy: a lower bound far below the claim shows",
        "nothing, and an error that these canaries do not meet stays unseen.",
    ]
    if result.flagged:
        end = ["FLAGGED: the run is not what the plan says.", *(f"- {finding}" for finding in result.findings)]
    write_answer(
        as_json,
        told,
        f"claimed:     epsilon = {result.claimed_epsilon:.4g} at delta = {format_number(result.delta)}",
        f"lower bound: epsilon = {result.lower_bound:.4g} at confidence {result.confidence:g}",
        f"             (if {result.assumes})",
        f"canaries:    {result.canaries_in} in, {result.canaries_out} out; power at least {result.power:.3g} at a "
        f"false positive rate of at most {result.false_positive_rate:.3g}, where the claim allows "
        f"{result.claimed_power:.3g}",
        f"noise:       {result.noise_ratio:.4f} of the planned standard deviation, on untouched coordinates",
        *end,
    )
    return 1 if result.flagged else 0
