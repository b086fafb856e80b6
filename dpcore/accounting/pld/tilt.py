"""The choice of the tilt. Any tilt gives valid bounds; these tilts give sharp ones."""

from __future__ import annotations

import math
from collections.abc import Callable

from dpcore.accounting.pld.moments import Moments


def saddle(moments: Moments, log_delta: float) -> float:
    """Return the tilt at which delta is about the given one, by the saddle-point formula.

    delta(K'(t)) is about exp(K - t K')/(t (1 + t) sqrt(2 pi K'')), which decreases in t.
    """
    # A bounded loss has no tilt with so small a delta. No loss here has lighter tails than a normal one of a tenth its
    # size.
    least = plain(moments) ** 2
    largest = 20.0 * (3.0 + math.sqrt(-2.0 * log_delta)) / math.sqrt(least)

    def above(theta: float) -> bool:
        value, mean, variance = moments(theta)
        if theta > largest or variance < 1e-4 * least:
            return False
        spread = math.log(theta) + math.log1p(theta) + 0.5 * math.log(2.0 * math.pi * max(variance, 1e-300))
        return value - theta * mean - max(spread, math.log(2.0)) > log_delta

    return _bisect(above)


def tilt_at(moments: Moments, epsilon: float) -> float:
    """Return the tilt at which the mean is epsilon, 0 where it is larger without one."""
    if moments(0.0)[1] >= epsilon:
        return 0.0
    largest = 1e3 / plain(moments)
    return _bisect(lambda theta: theta < largest and moments(theta)[1] < epsilon)


def plain(moments: Moments) -> float:
    """Return the standard deviation of the loss without a tilt, bounded away from 0."""
    _, mean, variance = moments(0.0)
    return max(math.sqrt(variance), 1e-3 * abs(mean), 1e-100)


def _bisect(grow: Callable[[float], bool]) -> float:
    low, high = 0.0, 2.0  # of log theta
    while low > -40.0 and not grow(math.exp(low)):
        low, high = low - 4.0, low
    while high < 60.0 and grow(math.exp(high)):
        low, high = high, high + 4.0
    while high - low > 1e-3:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if grow(math.exp(middle)) else (low, middle)
    return math.exp(0.5 * (low + high))
