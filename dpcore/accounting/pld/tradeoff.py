"""The attacker's view of a privacy-loss distribution: the trade-off curve and the best test.

An attacker who has to distinguish two neighboring data sets, P from Q, has at a false-positive rate x at most the
true-positive rate

    TPR(x) = inf over a >= 0 of H(a) + a x,   H(a) = E_Q[(dP/dQ - a)_+],

since H(a) = max over tests of TPR - a FPR. With roles exchanged H'(a) = 1 - a + a H(1/a). delta(eps) here is the larger
one of both directions, D(a) = max(H, H')(a) at a = e^eps >= 1, and D(a) = 1 - a + a D(1/a) below: the infimum over it
is the upper concave envelope of the better of both directions, the best that an attacker gets who may choose the
direction at random. It is never above what (epsilon, delta) for all epsilon allows (Dong, Roth, Su 2022, on the
duality of both).

Bounds: any a gives an upper bound of TPR with an upper bound of D. From below, D is convex: between two points it is
above the extension of the chord of the two points to the left, and of the two to the right.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dpcore.accounting.events import Event
from dpcore.accounting.phases import demand_phases
from dpcore.accounting.pld import intervals
from dpcore.accounting.pld.compose import tilt_at
from dpcore.accounting.pld.intervals import Interval, delta_interval, delta_sides, expected_epsilon, merged, too_quiet
from dpcore.accounting.pld.loss import Array, Integers
from dpcore.errors import ArgumentError
from dpcore.spec import validate

_CLOSE = 1e-2  # relative
_POINTS = 120  # of the curve, until delta is a tenth of the smallest rate; larger epsilons do not affect it
_LOOKS = 12  # at single epsilons, if all else leaves the bounds apart
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

    false_positive_rates: Array = field(repr=False)
    lower: Array = field(repr=False)
    upper: Array = field(repr=False)
    advantage: Interval
    epsilons: Array = field(repr=False)
    delta_lower: Array = field(repr=False)
    delta_upper: Array = field(repr=False)


def curve(event: Event, epsilons: Sequence[float] | Array) -> tuple[Array, Array]:
    """Return certified lower and upper bounds on delta at each epsilon.

    Parameters
    ----------
    event : Event
        The releases.
    epsilons : (n,) sequence of float
        Each 0 or more, in any order.

    Returns
    -------
    tuple of (n,) float64
        Lower and upper bounds, within 1e-2 of each other (relative) unless rounding does not allow it: with rare, far
        losses they may be far apart, at worst 0 and 1.
    """
    wanted = np.array([validate.non_negative(epsilons=epsilon) for epsilon in epsilons], dtype=np.float64)
    lower, upper = _curve(event, wanted, 0.0)
    # Delta never rises with epsilon: if rounding leaves the bounds apart, those of the neighbors may be closer.
    order = np.argsort(wanted, kind="stable")
    upper[order] = np.minimum.accumulate(upper[order])
    lower[order] = np.maximum.accumulate(lower[order][::-1])[::-1]
    return lower, upper


def _curve(event: Event, wanted: Array, enough: float) -> tuple[Array, Array]:
    """Return the result of `curve`, except that at epsilon 0 a gap of `enough` is enough."""
    parts = demand_phases(event)
    lower, upper = np.zeros_like(wanted), np.ones_like(wanted)
    if math.isinf(parts.mu):
        return np.ones_like(wanted), upper
    parts = merged(parts)
    if not parts.steps or too_quiet(parts):
        values = [delta_interval(event, epsilon) for epsilon in wanted.tolist()]
        return np.array([value.lower for value in values]), np.array([value.upper for value in values])
    sides = delta_sides(parts, float(wanted.max(initial=0.0)))

    def far_apart() -> npt.NDArray[np.bool_]:
        gap = upper - lower
        apart: npt.NDArray[np.bool_] = (gap > _CLOSE * upper) & (upper > 1e-280) & ((gap > enough) | (wanted == 0.0))
        return apart

    left = np.unique(wanted)
    stride = math.ceil(len(left) / _LOOKS)
    while len(left):
        first, begin = left[0], left
        for ahead, share in ((4.0, 0.5), (0.0, 0.1)):
            _narrow(sides, wanted, lower, upper, np.flatnonzero(np.isin(wanted, left)), ahead, share)
            left = np.unique(wanted[np.isin(wanted, left) & far_apart()])
            if not len(left) or left[0] > first:
                break
        else:
            here = wanted == first
            value = delta_interval(event, float(first), 0.5 * _CLOSE * float(upper[here][0]))
            lower[here], upper[here] = np.maximum(lower[here], value.lower), np.minimum(upper[here], value.upper)
            # If rounding keeps the bounds apart, it does so all around.
            left = left[left >= begin[min(stride, len(begin) - 1)]]
            left = left[left > first]
    return np.minimum(lower, upper), upper


def _narrow(
    sides: Sequence[intervals.Side],
    epsilons: Array,
    lower: Array,
    upper: Array,
    these: Integers,
    ahead: float,
    share: float,
) -> None:
    """Narrow the bounds at some of the epsilons, from the least of them on, by one composition for each bound.

    The tilt is set some standard deviations `ahead` of the least, the grid for a share of the gap. The result is
    certified everywhere, and sharp as long as the tilted masses are more than their rounding error.
    """
    first, last = float(epsilons[these].min()), float(epsilons[these].max())
    ends, later = np.zeros(len(these)), []
    for side in sides:
        side.aim(tilt_at(side.rough, first))
        side.aim(tilt_at(side.rough, min(last, first + ahead * side.spread)))
        beyond = max(first, side.reference) + 0.75 * ahead * side.spread
        side.settle(share * _CLOSE, tilt_at(side.rough, min(last, beyond)))
        curve, below = side.curves(behind=side.reference - first + 4.0 * side.h)
        deltas = np.array([max(0.0, curve.delta(float(epsilon))) for epsilon in epsilons[these]])
        ends = np.maximum(ends, deltas)
        later.append((int(np.count_nonzero(deltas >= ends)), below))
    upper[these] = np.minimum(upper[these], ends)
    for _, below in sorted(later, key=lambda one: -one[0]):
        if np.all(upper[these] - lower[these] <= _CLOSE * upper[these]):
            return
        curve = below()
        deltas = np.array([curve.delta(float(epsilon)) for epsilon in epsilons[these]])
        lower[these] = np.maximum(lower[these], deltas)


def trade_off(event: Event, false_positive_rates: float | Sequence[float] | None = None) -> TradeOff:
    """Return the best true-positive rates of an attacker, and the curve of delta over epsilon.

    Parameters
    ----------
    event : Event
        The releases.
    false_positive_rates : float or sequence of float, optional
        Each strictly between 0 and 1; the default is 24 from 1e-6 to 0.56, evenly spaced in the logarithm.

    Returns
    -------
    TradeOff
        Certified bounds; with an infinite epsilon all true-positive rates are 1.
    """
    given = _RATES if false_positive_rates is None else np.atleast_1d(np.asarray(false_positive_rates))
    rates = np.sort(np.array([validate.open_unit(false_positive_rates=rate) for rate in given], dtype=np.float64))
    if not len(rates):
        raise ArgumentError("false_positive_rates=(): must have at least one rate between 0 and 1")
    smallest = min(float(rates[0]), 1.0 - float(rates[-1]))
    end = expected_epsilon(event, 0.1 * smallest)
    # Farther out a x is above 1, and 1 - a is 1 in float64.
    end = end if math.isinf(end) else min(end, 40.0 - math.log(smallest))
    if math.isinf(end):
        ones, grid = np.ones_like(rates), np.linspace(0.0, 1.0, _POINTS)
        return TradeOff(rates, ones, ones, Interval(1.0, 1.0), grid, np.ones(_POINTS), np.ones(_POINTS))
    epsilons = np.linspace(0.0, max(end, 1e-6), _POINTS)
    # This gap is 1e-2 of the rates, and of their distance to 1.
    low, high = _curve(event, epsilons, _CLOSE * smallest)
    advantage = Interval(float(low[0]), float(high[0]))
    ratios = np.exp(epsilons)
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
