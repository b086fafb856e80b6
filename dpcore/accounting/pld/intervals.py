"""Certified epsilon and delta of events."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from dpcore.accounting.events import Event
from dpcore.accounting.gaussian import gaussian_epsilon, log_delta
from dpcore.accounting.phases import LEAST_ALLOCATED, AllocationStep, Phases, demand_phases, phases
from dpcore.accounting.pld import certify
from dpcore.accounting.pld.certify import Interval
from dpcore.accounting.pld.moments import saddle, tilt_at
from dpcore.accounting.pld.problem import problem
from dpcore.errors import ArgumentError
from dpcore.spec import validate

_LEAST_LOG_DELTA = -692.0  # below 1e-300; further down single masses leave the range of float64
_LEAST_NOISE = 1e-6  # losses are of the order of its inverse square: single ones leave the range of the grid
_MOST_STEPS = 1 << 40  # the rounding of so many adds half a unit to epsilon; of 2^48, more than float64 holds to delta


def epsilon_interval(event: Event, delta: float, tolerance: float | None = None) -> Interval:
    """Return certified bounds on the smallest epsilon >= 0 at which the event is (epsilon, delta)-private.

    Parameters
    ----------
    event : Event
        What was released.
    delta : float
        0 < delta < 1.
    tolerance : float, optional
        Largest gap asked for, upper minus lower: absolute, in units of epsilon. The default is max(1e-3 epsilon, 1e-4).

    Returns
    -------
    Interval
        Holds the epsilon of the event's dominating pairs of distributions, the larger one of both directions. The upper
        end is a valid epsilon of the event. For subsets of fixed size see `dpcore.accounting.pld.loss` for the curve.

    Raises
    ------
    ArgumentError
        If delta lies outside (0, 1), the tolerance is not above 0, or the event holds more than 2^40 sampled steps.
    PrivacyError
        If the event has a part that is unknown here.

    Notes
    -----
    Rounding in float64 is part of the bounds. If it, the largest grid (2^20 points) or the ten rounds of refinement do
    not allow the tolerance, the bounds found are returned; they are certified all the same. Known cases: tolerances
    below about 1e-6 epsilon; rare events with a small epsilon (sample_rate=1.2e-5, noise_multiplier=0.83, steps=20,200,
    delta=2e-11: a gap of 7e-4 at epsilon 0.039); 10^8 steps and more (a gap of 1.5e-2 epsilon was met at 2.6e8); delta
    of 1e-170 and less; noise multipliers below 0.05 (at 0.01 the gap is some 2e-3 epsilon, at 0.001 the lower end is
    0, below 1e-6, and of random allocation below 0.25, the upper end is that without
    sampling).

    References
    ----------
    Doroshenko, Ghazi, Kamath, Kumar, Manurangsi, "Connect the Dots", 2022 (upper end); the lower end by merging
    outcomes is derived in `dpcore.accounting.pld.discretize`, rounding and truncation in
    `dpcore.accounting.pld.compose`.
    """
    delta = validate.open_unit(delta=delta)
    tolerance = None if tolerance is None else validate.positive(tolerance=tolerance)
    return _epsilon(demand_phases(event), delta, tolerance)


@lru_cache(maxsize=64)
def _epsilon(found: Phases, delta: float, tolerance: float | None) -> Interval:
    if math.isinf(found.mu):
        return Interval(math.inf, math.inf)
    found = merged(found)
    if not found.steps:
        if found.mu == 0.0:
            return Interval(0.0, 0.0)
        slack = _gaussian_slack(found.mu)
        low = gaussian_epsilon(found.mu, min(delta * (1.0 + slack), 1.0 - 1e-16))
        return Interval(low, gaussian_epsilon(found.mu, delta * (1.0 - slack)))
    if _variation(found) <= delta:
        return Interval(0.0, 0.0)
    # Sampling only helps: a bound as if everyone took part in every step.
    mu = math.hypot(found.mu, math.sqrt(sum(count for _, count in found.steps)) / _least_noise(found))
    whole = gaussian_epsilon(mu, delta * (1.0 - _gaussian_slack(mu)))
    if _too_quiet(found):
        return Interval(0.0, whole)
    target = max(math.log(delta), _LEAST_LOG_DELTA)
    sides = certify.start(problem(found, target), lambda moments: saddle(moments, target))
    interval = certify.refine(
        sides, lambda curve: curve.epsilon(delta), lambda now: tolerance or max(1e-3 * now.lower, 1e-4), retilt=True
    )
    return Interval(min(interval.lower, whole), min(interval.upper, whole))


def delta_interval(event: Event, epsilon: float, tolerance: float | None = None) -> Interval:
    """Return certified bounds on the smallest delta for which the event is (epsilon, delta)-private.

    Parameters
    ----------
    event : Event
        What was released.
    epsilon : float
        0 or more, finite.
    tolerance : float, optional
        Largest gap asked for; the default is 1e-3 delta, however small delta is (down to about 1e-280).

    Returns
    -------
    Interval
        Within [0, 1], of the same curve as in `epsilon_interval`, with the same errors and notes. At a million steps or
        epsilons in the thousands the largest grid leaves up to 5e-3 delta.
    """
    epsilon = validate.non_negative(epsilon=epsilon)
    tolerance = None if tolerance is None else validate.positive(tolerance=tolerance)
    return _delta(demand_phases(event), epsilon, tolerance)


@lru_cache(maxsize=64)
def _delta(found: Phases, epsilon: float, tolerance: float | None) -> Interval:
    if math.isinf(found.mu):
        return Interval(1.0, 1.0)
    found = merged(found)
    if not found.steps:
        if found.mu == 0.0:
            return Interval(0.0, 0.0)
        slack, value = _gaussian_slack(found.mu), math.exp(log_delta(found.mu, epsilon))
        return Interval(value * (1.0 - slack), min(1.0, value * (1.0 + slack) + 1e-300))
    if _too_quiet(found):
        return Interval(0.0, min(1.0, _variation(found)))
    sides = delta_sides(found, epsilon)
    interval = certify.refine(
        sides, lambda curve: curve.delta(epsilon), lambda now: tolerance or max(1e-3 * now.lower, 1e-285), retilt=False
    )
    upper = min(interval.upper, _variation(found))
    return Interval(min(interval.lower, upper), upper)


def _least_noise(found: Phases) -> float:
    """Return the smallest noise multiplier of a sampled step."""
    return min(sigma for step, _ in found.steps for *_, sigma in step.components)


def _too_quiet(found: Phases) -> bool:
    """Whether some losses are too large for a grid."""
    allocated = [step.noise_multiplier for step, _ in found.steps if isinstance(step, AllocationStep)]
    return _least_noise(found) < _LEAST_NOISE or min(allocated, default=math.inf) < LEAST_ALLOCATED


def _variation(found: Phases) -> float:
    """Return a bound on delta at epsilon 0: that of a step is its total variation, and of several at most their sum.

    That of N(0, s^2) and a mixture that takes N(1, s^2) at rate q is q erf(1/(2 sqrt(2) s)). Far events at tiny rates
    are hard for a grid, and need none when delta is larger than their probability.
    """
    total = math.erf(found.mu / math.sqrt(8.0))
    for step, count in found.steps:
        each = (weight * q * math.erf(1.0 / (math.sqrt(8.0) * sigma)) for weight, q, sigma in step.components)
        total += count * math.fsum(each)
    return total * (1.0 + 1e-9)


def delta_sides(found: Phases, epsilon: float) -> list[certify.Side]:
    """Return what `certify.refine` needs for the delta at an epsilon."""
    task = problem(found, _LEAST_LOG_DELTA)
    expected = _LEAST_LOG_DELTA
    for direction in task.directions:
        rough = task.rough(direction)
        theta = tilt_at(rough, epsilon)
        value, mean, variance = rough(theta)
        # An order below the saddle-point formula, so that the tails are resolved far enough in any case.
        size = math.log1p(theta * (1.0 + theta) * math.sqrt(2.0 * math.pi * variance))
        expected = max(expected, value - theta * max(mean, epsilon) - size - 3.0)
    return certify.start(problem(found, min(expected, -1.0)), lambda moments: tilt_at(moments, epsilon))


def expected_epsilon(event: Event, delta: float) -> float:
    """Return about what epsilon is at delta, a few percent off; no bound."""
    found = demand_phases(event)
    if math.isinf(found.mu):
        return math.inf
    found = merged(found)
    if not found.steps:
        return gaussian_epsilon(found.mu, delta)
    sides = certify.start(problem(found, math.log(delta)), lambda moments: saddle(moments, math.log(delta)))
    return max(certify.scout(side, lambda curve: curve.epsilon(delta)) for side in sides)


def merged(found: Phases) -> Phases:
    """Return the phases without steps in which no one takes part; raise if there are too many of the others."""
    steps = tuple((step, count) for step, count in found.steps if step.components)
    total = sum(count for _, count in steps)
    if total > _MOST_STEPS:
        raise ArgumentError(f"event: holds {total} sampled steps: the PLD accountant covers at most 2^40")
    return replace(found, steps=steps)


def _gaussian_slack(mu: float) -> float:
    """Return a bound on the relative rounding error of the closed form of delta (see `dpcore.accounting.gaussian`).

    The arguments of its tails are rounded in proportion to mu, and the difference of these tails is mu times as large.
    No error is proven of the functions used. Against 60 digits, an eighth of this bound was the most that was measured,
    for mu from 1e-3 to 40.
    """
    return min(0.5, 4e-11 + 1.6e-14 * (mu + 1.0 / mu))


@dataclass(frozen=True)
class PldAccountant:
    """Privacy-loss distributions: the upper ends of `epsilon_interval` and `delta_interval`.

    Covers every event that comes down to a Gaussian mechanism and sampled Gaussian steps (`dpcore.accounting.phases`).
    """

    name = "pld"
    floor = "the PLD accountant rounds epsilon up, as a rule by at most max(1e-3 epsilon, 1e-4)"

    def supports(self, event: Event) -> bool:
        """Whether every part of the event is known."""
        return phases(event) is not None

    def epsilon(self, event: Event, delta: float) -> float:
        """Return the upper end at the default tolerance."""
        return epsilon_interval(event, delta).upper

    def delta(self, event: Event, epsilon: float) -> float:
        """Return the upper end at the default tolerance, at most 1."""
        return min(1.0, delta_interval(event, epsilon).upper)
