"""Log moments of a composition: they say how to tilt it, how wide it is, and how far apart two bounds are.

Any tilt gives valid bounds; the tilts chosen here give sharp ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from dpcore.accounting.pld.discretize import Masses
from dpcore.accounting.pld.loss import Array


class Moments:
    """K(theta) = log E_P e^(theta L) of a composition, infinite masses left out, and its derivatives."""

    def __init__(self, parts: Sequence[Masses]) -> None:
        self.parts = parts
        with np.errstate(divide="ignore"):
            self._logs = [np.log(part.p) for part in parts]
        self._losses = [part.losses for part in parts]

    def tilted(self, theta: float) -> list[tuple[Array, Array]]:
        """Return the tilted masses (steps, n) and the log moments (steps,) of each part."""
        found = []
        for logs, losses in zip(self._logs, self._losses, strict=True):
            exponent = logs + theta * losses
            top = np.maximum(exponent.max(axis=1, keepdims=True), -1e300)  # a lower bound may have no mass at all
            weights = np.exp(exponent - top)
            total = np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
            found.append((weights / total, (top + np.log(total))[:, 0]))
        return found

    def __call__(self, theta: float) -> tuple[float, float, float]:
        """Return K, K' and K'' at theta."""
        value = mean = variance = 0.0
        for (p, log_moment), losses, part in zip(self.tilted(theta), self._losses, self.parts, strict=True):
            first = (p * losses).sum(axis=1)
            second = (p * (losses - first[:, None]) ** 2).sum(axis=1)
            value += float(part.counts @ log_moment)
            mean += float(part.counts @ first)
            variance += float(part.counts @ second)
        return value, mean, variance

    def log_moment(self, theta: float) -> float:
        """Return K at theta."""
        return float(sum(part.counts @ log for (_, log), part in zip(self.tilted(theta), self.parts, strict=True)))


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
