"""Builds the privacy statement from a plan and the facts of a run, and its guarantee from events."""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from dpcore import accounting, sampling
from dpcore.accounting import Event, NonPrivate, PrivateSelection
from dpcore.accounting.branches import Rows, count
from dpcore.accounting.pld import trade_off
from dpcore.plan import scales
from dpcore.plan.plan import Plan, grid_of
from dpcore.spec.canonical import digest
from dpcore.spec.keys import Provenance
from dpcore.spec.layout import Layout
from dpcore.spec.rounded_normal import distance
from dpcore.spec.validate import non_negative
from dpcore.spec.version import __version__
from dpcore.statement.assumptions import OWN_SAMPLER, assumptions
from dpcore.statement.assumptions import of_selection as sentences
from dpcore.statement.statement import Statement

FALSE_POSITIVE_RATES: Final = (1e-3, 1e-2)

ROUTES: Final = {
    "rdp": (
        "Renyi divergence of every step at many orders above 1, added up over the steps; from an order a and its sum R "
        "follows epsilon = R + ln(1 - 1/a) - (ln(delta) + ln(a))/(a - 1) (Canonne, Kamath, Steinke 2020, Proposition "
        "12); the smallest over the orders is stated."
    ),
    "pld": (
        "Privacy loss distribution of every step on a grid, rounded up for the upper end and down for the lower one, "
        "composed over the steps by convolution (FFT) with its errors added, for both directions of the adjacency; "
        "epsilon solves delta = E[max(0, 1 - exp(epsilon - loss))]."
    ),
    "selection": (
        "The winner of a random number of runs: a run's epsilon, by its privacy loss distribution, at the delta at "
        "which any of the runs meets an event of that probability with the stated delta; and the log ratio at which "
        "the number of runs weighs results on neighbours (Koskela, Redberg, Wang 2024; dpcore.accounting.selection)."
    ),
    "gaussian": (
        "Exact: all steps are one Gaussian mechanism with mu = sqrt(sum of (sensitivity/noise)^2), and delta = "
        "Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu) (Balle, Wang 2018, Theorem 8)."
    ),
}
"""How each accountant comes from the event to epsilon, one sentence each."""


def guarantee(event: Event, planned: Event, delta: float) -> dict[str, Any]:
    """Return the fields of a `dpcore.statement.Statement` that follow from its events.

    The certified interval of the smallest epsilon and the attacker's limits are empty if unknown.
    """
    spent, interval, left = accounting.epsilons(event, delta), dict[str, float](), dict[str, Any]()
    if "pld" in spent:
        ends, (rates, advantage) = accounting.epsilon_interval(event, delta), _attack(event)
        interval = {"lower": float(ends.lower), "upper": float(ends.upper)}
        left = {"true_positive_rate": dict(rates), "advantage": advantage}
    return {
        "event": event.to_dict(),
        "event_planned": planned.to_dict(),
        "epsilon": spent,
        "epsilon_planned": accounting.epsilons(planned, delta),
        "epsilon_interval": interval,
        "attacker": left,
        "derivation": {name: ROUTES[name] for name in spent},
    }


@lru_cache(maxsize=64)
def _attack(event: Event) -> tuple[dict[str, float], float]:
    """Return upper bounds on how well an attacker can distinguish two neighboring data sets."""
    curve = trade_off(event, FALSE_POSITIVE_RATES)
    rates = {f"{rate:g}": float(upper) for rate, upper in zip(FALSE_POSITIVE_RATES, curve.upper, strict=True)}
    return rates, float(curve.advantage.upper)


NO_KEY = "none: noise supplied by the caller"
CALLER_NOISE = NonPrivate("the noise was supplied by the caller")


def state(
    plan: Plan,
    delta: float,
    *,
    steps_taken: int,
    keys: Provenance,
    backend: str,
    abandoned: Sequence[Rows] | int = (),
    stopped_by_results: bool = False,
    rng: str = "chacha20",
    layout: Layout | None = None,
    dimension: int | None = None,
    caller_noise: bool = False,
    caveats: tuple[str, ...] = (),
    note: str = "",
    software: Mapping[str, str] | None = None,
    ledger: Mapping[str, Any] | None = None,
) -> Statement:
    """Return the privacy statement of a run by `plan` after `steps_taken` steps.

    `abandoned` is as in `Plan.event_after`; with `caller_noise` nothing is private. `dimension` is the layout's by
    default.

    The epsilon of a number of steps requires that this number was fixed beforehand. With `stopped_by_results` the
    releases decided it: what is known in the end is a function of the whole plan's releases, of which those up to the
    stop decide it and the rest is left out. So the event is that of the plan.
    """
    delta, ledger = non_negative(delta=delta), ledger or {}
    counted = plan.steps if stopped_by_results else steps_taken
    event, planned = (plan.event_after(steps, abandoned) for steps in (counted, plan.steps))
    if caller_noise:
        event = planned = CALLER_NOISE
    if rng != "chacha20":
        event = planned = NonPrivate(f"the noise came from {rng}, which is not cryptographic")
    number = abandoned if isinstance(abandoned, int) else count(abandoned)
    sampler = plan.sampler.describe()
    if event.adjacency:
        # Joint moments turn the sampler's adjacency into another one; a statement has one.
        sampler["adjacency"] = str(event.adjacency)
    unit = plan.sampler.unit_of_privacy
    if unit != "example":
        sampler["unit"] = unit
    dimension = layout.dimension if layout is not None else dimension
    grid = {} if dimension is None or caller_noise else grid_of_releases(plan, dimension, number)
    needed = assumptions(plan, keys, number, ledger, on_grid=bool(grid))
    strategy, correlation = plan.method.noise.strategy, {}
    if strategy is not None:
        moved = {} if plan.run_sensitivity is None else {"sensitivity_of_run": plan.run_sensitivity}
        correlation = {"strategy_sha256": digest(strategy.describe()), **moved}
    method, own = plan.method.describe(), sampling.foreign(plan.sampler)
    # Its batches and its event are two claims of one person.
    trust = () if own is None else (f"{own.__module__}.{own.__qualname__}".join(OWN_SAMPLER),)
    return Statement(
        adjacency=str(planned.adjacency or "none"),
        unit=unit,
        sampler=sampler,
        clip=_clip(plan, method["clip"]),
        noise={
            **method["noise"],
            "mechanism": "Gaussian",
            **_scales(plan),
            **correlation,
            **grid,
            **({} if layout is None else {"layout_sha256": layout.digest()}),
        },
        method=method,
        steps_planned=plan.steps,
        steps_taken=steps_taken,
        steps_abandoned=number,
        rows_abandoned=() if isinstance(abandoned, int) else tuple(abandoned),
        delta=delta,
        **guarantee(event, planned, delta),
        randomness={
            "rng": rng,
            "cryptographic": rng == "chacha20" and not caller_noise,
            "key": NO_KEY if caller_noise else keys.origin,
            "forks": keys.forks,
        },
        caveats=(*needed, *trust, *caveats),
        software={**versions(), "backend": backend, **(software or {})},
        ledger=dict(ledger),
        note=note,
    )


def of_selection(run: Statement, law: tuple[float, float | None], ledger: Mapping[str, Any]) -> Statement:
    """Return the statement of a selection from that of the run that won it.

    `law` is expected_runs and shape of `dpcore.accounting.PrivateSelection`. Every run of a selection is a whole plan,
    so that the draws of all together are from their law as far as that of one run times the mean of their number.
    """
    event, noise = PrivateSelection(Event.from_dict(run.event_planned), *law), dict(run.noise)
    if "grid" in noise:
        noise["grid"] = {**noise["grid"], "law_distance": law[0] * noise["grid"]["law_distance"]}
    caveats = sentences(run.caveats, ledger)
    return replace(run, **guarantee(event, event, run.delta), noise=noise, caveats=caveats, ledger=dict(ledger))


def versions() -> dict[str, str]:
    """Return the versions that a statement records."""
    import scipy

    software = {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__}
    return {"dpcore": __version__, **software}


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
        clip["least_norm"], clip["greatest_norm"] = plan.clip_limits
        clip["in_force"] = (
            "norm and sensitivity are those of the first step; every step moves the norm by the released share of "
            "vectors whose norm it left as it was"
        )
    query = plan.method.preconditioning
    if query is not None:
        step = query.unscaled_steps
        clip["max_scaled_norm"] = plan.clip_at(step).max_grad_norm
        clip["scaled_sensitivity"] = plan.sensitivity_at(step).contribution
        clip["standard_deviation_on_scaled_sum"] = plan.noise_standard_deviation(step)
    return clip


def _scales(plan: Plan) -> dict[str, Any]:
    # Correlated noise has another standard deviation at each step: this is that of the seed noise Z.
    seed = "" if plan.method.noise.strategy is None else "seed_"
    said: dict[str, Any] = {f"{seed}standard_deviation_on_sum": plan.noise_standard_deviation()}
    if plan.adaptive_clip is not None:
        said["multiplier_on_sum"] = plan.gradient_noise_multiplier
        said["standard_deviation_on_bits"] = plan.bit_noise_standard_deviation
        said["in_force"] = (
            "the standard deviation on the sum is that of the first step; at every step it is the multiplier on the "
            "sum times the sensitivity under the norm in force"
        )
    square, update = plan.square_noise_standard_deviation(), plan.method.update
    contribution = plan.sensitivity_at(0).contribution
    if update.second_moment == "joint" and square:
        # The pair moves as far as the gradient does, which under replacement is twice the clip.
        joint = scales.joint_scale(update, contribution)
        said |= {"standard_deviation_on_square": square, "joint_scale": joint}
        return said | {"sensitivity_under_replacement": 2 * contribution}
    if square:
        # Each of the two releases has sqrt(2) sigma of noise for a unit of its own sensitivity.
        share = square / (math.sqrt(2) * plan.noise_multiplier)
        return said | {"standard_deviation_on_square": square, "sensitivity_of_square": share}
    return said


def grid_of_releases(plan: Plan, dimension: int, abandoned: int = 0) -> dict[str, Any]:
    """Return the releases' grid, and how far all draws of the planned run and of abandoned steps are from their law."""
    if plan.noise_multiplier == 0:
        return {}
    steps, square = plan.steps + abandoned, bool(plan.square_noise_standard_deviation())
    draws = steps * ((1 + square) * dimension + (plan.adaptive_clip is not None))
    bits = grid_of(plan, dimension).bits
    return {"grid": {"bits": bits, "coordinates": dimension, "law_distance": distance(draws)}}
