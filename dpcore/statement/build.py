"""From a plan and what a run knows of itself to the privacy statement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dpcore.accounting import NonPrivate
from dpcore.plan import scales
from dpcore.spec.canonical import digest
from dpcore.spec.keys import Provenance
from dpcore.spec.layout import Layout
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.clipping.adaptive import limits
from dpcore.statement.assumptions import OWN_SAMPLER, assumptions
from dpcore.statement.guarantee import guarantee
from dpcore.statement.statement import Statement

if TYPE_CHECKING:
    from dpcore.plan.plan import Plan

NO_KEY = "none: noise supplied by the caller"
CALLER_NOISE = NonPrivate("the noise was supplied by the caller")


def not_cryptographic(rng: str) -> NonPrivate:
    """Return the event of a run whose noise another generator drew."""
    return NonPrivate(f"the noise came from {rng}, which is not cryptographic")


def state(
    plan: Plan,
    delta: float,
    *,
    steps_taken: int,
    abandoned: int,
    branches: int | None,
    keys: Provenance,
    rng: str,
    layout: Layout | None,
    caller_noise: bool,
    caveats: tuple[str, ...],
    note: str,
    software: Mapping[str, str],
    ledger: Mapping[str, Any],
) -> Statement:
    """Return the statement of a run by `plan`; arguments as of `dpcore.Plan.statement`."""
    event, planned = (plan.event_after(steps, abandoned, branches) for steps in (steps_taken, plan.steps))
    if caller_noise:
        event = planned = CALLER_NOISE
    if rng != "chacha20":
        event = planned = not_cryptographic(rng)
    sampler = plan.sampler.describe()
    if event.adjacency:
        # Joint moments turn the sampler's adjacency into another one; a statement has one.
        sampler["adjacency"] = str(event.adjacency)
    unit = str(sampler.get("unit", "example"))
    needed = assumptions(
        unit=unit,
        secret_batches=bool(sampler.get("secret", not plan.sampler.keeps_order)),
        second_moment=plan.method.update.second_moment,
        origin=keys.origin,
        forks=keys.forks,
        abandoned=abandoned,
        ledger=ledger,
        terms=plan.largest_batch,
    )
    method = plan.method.describe()
    return Statement(
        adjacency=str(planned.adjacency or "none"),
        unit=unit,
        sampler=sampler,
        clip=_clip(plan, method["clip"]),
        noise={
            **method["noise"],
            "mechanism": "Gaussian",
            **_scales(plan),
            **_correlation(plan),
            **({} if layout is None else {"layout_sha256": layout.digest()}),
        },
        method=method,
        steps_planned=plan.steps,
        steps_taken=steps_taken,
        steps_abandoned=abandoned,
        branches_abandoned=min(abandoned, branches or 0),
        delta=delta,
        **guarantee(event, planned, delta),
        randomness={
            "rng": rng,
            "cryptographic": rng == "chacha20" and not caller_noise,
            "key": NO_KEY if caller_noise else keys.origin,
            "forks": keys.forks,
        },
        caveats=(*needed, *_on_trust(plan.sampler), *caveats),
        software=dict(software),
        ledger=dict(ledger),
        note=note,
    )


def _on_trust(sampler: Any) -> tuple[str, ...]:
    """What is said of a sampler that is not the library's: its batches and its event are two claims of one person."""
    inner = getattr(sampler, "sampler", sampler)
    own = next((type(one) for one in (sampler, inner) if not type(one).__module__.startswith("dpcore.sampling.")), None)
    if own is None:
        return ()
    return (f"{own.__module__}.{own.__qualname__}".join(OWN_SAMPLER),)


def _clip(plan: Plan, described: Mapping[str, Any]) -> dict[str, Any]:
    """The clip with the norm of every group, from which the sensitivity follows."""
    clip, grouping = dict(described), plan.grouping_at()
    if not isinstance(clip.get("groups", ""), str):  # a clip of the caller's own need not say
        del clip["max_grad_norm"]
    clip |= {
        "group_norms": dict(zip(grouping.names, grouping.bounds, strict=True)),
        "sensitivity": plan.sensitivity_at().contribution,
    }
    if plan.adaptive_clip is not None:
        clip |= adaptive_norms(plan.method.clip.max_grad_norm)
    query = plan.method.preconditioning
    if query is not None:
        step = query.unscaled_steps
        clip["max_scaled_norm"] = plan.clip_at(step).max_grad_norm
        clip["scaled_sensitivity"] = plan.sensitivity_at(step).contribution
        clip["standard_deviation_on_scaled_sum"] = plan.noise_standard_deviation(step)
    return clip


def adaptive_norms(initial: float) -> dict[str, Any]:
    """Return what a statement says of an adaptive clip beside its settings and the norm and sensitivity to begin with.

    Parameters
    ----------
    initial : float
        C_0.
    """
    least, most = limits(initial)
    words = (
        "norm and sensitivity are those of the first step; every step moves the norm by the released share of vectors "
        "whose norm it left as it was"
    )
    return {"least_norm": least, "greatest_norm": most, "in_force": words}


def adaptive_noise(adaptive: AdaptiveClip, sigma: float, batch_size: float) -> dict[str, Any]:
    """Return what a statement says of the noise of an adaptive clip: on the sum, raised, and on the bits.

    Parameters
    ----------
    adaptive : AdaptiveClip
    sigma : float
        The noise multiplier of both together.
    batch_size : float
        B.
    """
    bits = adaptive.noise_on_bits(batch_size)
    words = (
        "the standard deviation on the sum is that of the first step; at every step it is the multiplier on the sum "
        "times the sensitivity under the norm in force"
    )
    return {
        "multiplier_on_sum": scales.raised_multiplier(sigma, bits),
        "standard_deviation_on_bits": bits,
        "in_force": words,
    }


def _scales(plan: Plan) -> dict[str, Any]:
    # Correlated noise has another standard deviation at each step: this is that of the seed noise Z.
    seed = "" if plan.method.noise.strategy is None else "seed_"
    said: dict[str, Any] = {f"{seed}standard_deviation_on_sum": plan.noise_standard_deviation()}
    if plan.adaptive_clip is not None:
        said |= adaptive_noise(plan.adaptive_clip, plan.noise_multiplier, plan.batch_size)
    square, update = plan.square_noise_standard_deviation(), plan.method.update
    contribution = plan.sensitivity_at(0).contribution
    if update.second_moment == "joint" and square:
        # The pair moves as far as the gradient alone does, which under replacement is twice the clip.
        joint = scales.joint_scale(update, contribution)
        said |= {"standard_deviation_on_square": square, "joint_scale": joint}
        return said | {"sensitivity_under_replacement": 2 * contribution}
    if square:
        # Each of the two releases has sqrt(2) sigma of noise for a unit of its own sensitivity.
        share = square / (math.sqrt(2) * plan.noise_multiplier)
        return said | {"standard_deviation_on_square": square, "sensitivity_of_square": share}
    return said


def _correlation(plan: Plan) -> dict[str, Any]:
    strategy = plan.method.noise.strategy
    if strategy is None:
        return {}
    said = {"strategy_sha256": digest(strategy.describe())}
    # In clip norms: how far an example moves C times the sums of the whole run.
    sensitivity = getattr(plan.event, "sensitivity", None)
    return said if sensitivity is None else {**said, "sensitivity_of_run": sensitivity}
