"""What a privacy-loss distribution means for an attacker: the whole curve, and the best test.

An attacker who has to tell two neighboring data sets apart, P from Q, has at a false-positive rate x at most the
true-positive rate

    TPR(x) = inf over a >= 0 of H(a) + a x,   H(a) = E_Q[(dP/dQ - a)_+],

since H(a) = max over tests of TPR - a FPR. With roles exchanged H'(a) = 1 - a + a H(1/a). delta(eps) here is the larger
one of both directions, D(a) = max(H, H')(a) at a = e^eps >= 1, and D(a) = 1 - a + a D(1/a) below: the infimum over it
is the upper concave envelope of the better of both directions, the best that an attacker gets who may choose the
direction at random. It is never above what (epsilon, delta) for all epsilon allows (Dong, Roth, Su 2022, Proposition
2.13).

Bounds: any a gives an upper bound of TPR with an upper bound of D. From below, D is convex: between two points it is
above the extension of the chord of the two points to the left, and of the two to the right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpcore import validate
from dpcore.accounting.events import Event
from dpcore.accounting.pld.interval import Interval
from dpcore.accounting.pld.intervals import delta_interval, delta_problem, epsilon_interval, merged, taken_apart
from dpcore.accounting.pld.loss import Array
from dpcore.errors import ArgumentError

_RATES = tuple(10.0 ** (-6.0 + 0.25 * k) for k in range(24))


@dataclass(frozen=True, eq=False)
class TradeOff:
    """The attacker's view of an event.

    Attributes
    ----------
    false_positive_rates : (n,) float64
        Ascending.
    lower, upper : (n,) float64
        Certified bounds on the best true-positive rate at these rates.
    advantage : Interval
        The largest TPR - FPR, which is delta at epsilon 0.
    epsilons, delta_lower, delta_upper : (m,) float64
        The curve that it comes from.
    """

    false_positive_rates: Array
    lower: Array
    upper: Array
    advantage: Interval
    epsilons: Array
    delta_lower: Array
    delta_upper: Array


def curve(event: Event, epsilons: Sequence[float] | Array) -> tuple[Array, Array]:
    """Return certified lower and upper bounds on delta at each epsilon.

    Parameters
    ----------
    event : Event
        What was released.
    epsilons : (n,) sequence of float
        Each 0 or more, in any order.

    Returns
    -------
    tuple of (n,) float64
        Lower and upper bounds, within 1e-2 of each other (relative) unless rounding or the first grid does not allow
        it.
    """
    wanted = np.array([validate.non_negative(epsilons=epsilon) for epsilon in epsilons], dtype=np.float64)
    found = taken_apart(event)
    lower, upper = np.zeros_like(wanted), np.ones_like(wanted)
    if math.isinf(found.mu):
        return np.ones_like(wanted), upper
    found = merged(found)
    if not found.steps:
        values = [delta_interval(event, epsilon) for epsilon in wanted.tolist()]
        return np.array([value.lower for value in values]), np.array([value.upper for value in values])
    open_ends = np.ones(len(wanted), dtype=bool)
    while open_ends.any():
        first = float(wanted[open_ends].min())
        task, sides = delta_problem(found, first)
        # A grid for several epsilons at once: what it gives is certified wherever it is, and kept where it is sharp.
        curves = [side.curves(task, math.ceil(2.8 / task.coarse)) for side in sides]
        lowers = [later() for _, later in curves]
        for k in np.flatnonzero(open_ends):
            epsilon = float(wanted[k])
            upper[k] = min(upper[k], max(0.0, *(above.delta(epsilon) for above, _ in curves)))
            lower[k] = max(lower[k], *(below.delta(epsilon) for below in lowers), 0.0)
            if upper[k] - lower[k] <= 1e-2 * upper[k] or upper[k] < 1e-280:
                open_ends[k] = False
        for k in np.flatnonzero(open_ends & (wanted == first)):
            value = delta_interval(event, first)
            lower[k], upper[k] = max(lower[k], value.lower), min(upper[k], value.upper)
            open_ends[k] = False
    return np.minimum(lower, upper), upper


def trade_off(event: Event, false_positive_rates: Sequence[float] | None = None, *, points: int = 120) -> TradeOff:
    """Return the best true-positive rates of an attacker, and the curve of delta over epsilon.

    Parameters
    ----------
    event : Event
        What was released.
    false_positive_rates : sequence of float, optional
        Each strictly between 0 and 1; the default is 24 from 1e-6 to 0.56, evenly spaced in the logarithm.
    points : int
        Number of epsilons of the curve, evenly spaced from 0 to where delta is a tenth of the smallest rate. More of
        them bring the bounds closer.

    Returns
    -------
    TradeOff
        Certified bounds; with an infinite epsilon all true-positive rates are 1.
    """
    given = _RATES if false_positive_rates is None else false_positive_rates
    rates = np.sort(np.array([validate.open_unit(false_positive_rates=rate) for rate in given], dtype=np.float64))
    if not len(rates):
        raise ArgumentError("false_positive_rates=(): must hold at least one rate between 0 and 1")
    points = validate.integer(points=points, minimum=4)
    end = epsilon_interval(event, 0.1 * min(float(rates[0]), 1.0 - float(rates[-1]))).upper
    if math.isinf(end):
        ones, grid = np.ones_like(rates), np.linspace(0.0, 1.0, points)
        return TradeOff(rates, ones, ones, Interval(1.0, 1.0), grid, np.ones(points), np.ones(points))
    epsilons = np.linspace(0.0, max(end, 1e-6), points)
    low, high = curve(event, epsilons)
    advantage = delta_interval(event, 0.0)
    low[0], high[0] = max(low[0], advantage.lower), min(high[0], advantage.upper)
    ratios = np.exp(np.minimum(epsilons, 700.0))
    both = np.concatenate([1.0 / ratios[:0:-1], ratios])
    # D(a) = 1 - a + a D(1/a), for a < 1.
    all_low = np.concatenate([1.0 - (1.0 - low[:0:-1]) / ratios[:0:-1], low])
    all_high = np.concatenate([1.0 - (1.0 - high[:0:-1]) / ratios[:0:-1], high])
    upper = np.minimum(1.0, (all_high[None, :] + both[None, :] * rates[:, None]).min(axis=1))
    lower = np.array([_least(both, all_low, all_high, rate) for rate in rates])
    return TradeOff(rates, np.minimum(np.maximum(lower, rates), upper), upper, advantage, epsilons, low, high)


def _least(a: Array, low: Array, high: Array, rate: float) -> float:
    """Return a lower bound on the infimum of D(a) + a x over all a >= 0, for a convex D known between bounds."""
    # Left of the first point D is above its chords to (0, 1), that is 1 - a; right of the last one it is 0 or more.
    best = min(float(1.0 - a[0] + a[0] * rate), float(a[-1] * rate))
    left, right = a[:-1], a[1:]
    before = np.concatenate([[0.0], a[:-2]])
    before_high = np.concatenate([[1.0], high[:-2]])
    rise = (low[:-1] - before_high) / (left - before)  # the chord before: a lower bound of the slope in the cell
    after = np.concatenate([a[2:], [np.inf]])
    after_high = np.concatenate([high[2:], [0.0]])
    with np.errstate(invalid="ignore"):
        fall = np.where(np.isinf(after), 0.0, (after_high - low[1:]) / (after - right))  # an upper bound of it
    rise, fall = np.clip(rise, -1.0, 0.0), np.clip(fall, -1.0, 0.0)
    # The lines low_left + rise (a - left) and low_right + fall (a - right) meet where the minimum may lie.
    with np.errstate(divide="ignore", invalid="ignore"):
        meet = (low[1:] - fall * right - low[:-1] + rise * left) / (rise - fall)
    meet = np.clip(np.where(np.isfinite(meet), meet, left), left, right)
    for at in (left, meet, right):
        value = np.maximum(low[:-1] + rise * (at - left), low[1:] + fall * (at - right)) + at * rate
        best = min(best, float(value.min()))
    return best
