"""Certified intervals: an upper and a lower bound on a common grid, refined until they meet.

The step of the grid is `COARSE` standard deviations of a step's tilted loss at first. Both errors are of second order
in it, so the ratio of the gap found to the gap asked for gives the next one. Everything returned is certified, however
far apart the ends are; what can keep them apart is rounding (below), or the largest transform (2^20 points).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri_exp

from dpcore.accounting.phases import Phases, PoissonStep
from dpcore.accounting.pld import discretize, loss
from dpcore.accounting.pld.compose import MOST_POINTS, Curve, Moments, compose
from dpcore.accounting.pld.interval import Interval
from dpcore.accounting.pld.loss import Array, Family

COARSE = 0.085
_ROUNDS = 8


@dataclass(frozen=True)
class Problem:
    """What is composed, and how far into the tails it is looked at.

    Attributes
    ----------
    families : tuple of Family
        All steps.
    steps : int
        How many there are.
    directions : tuple of str
        Those that differ.
    low, high : float
        Standard normal quantiles up to which a step's outcomes are resolved.
    """

    families: tuple[Family, ...]
    steps: int
    directions: tuple[str, ...]
    low: float
    high: float

    @property
    def coarse(self) -> float:
        """The first step of the grid: finer for many distinct steps, where a second round costs most."""
        return COARSE if sum(len(family.counts) for family in self.families) < 64 else 0.065

    @property
    def eta(self) -> float:
        """Bound on the relative error of masses, from that of the normal distribution function in its tail."""
        return (64.0 + 2.0 * self.high**2) * 2.0**-52

    def grids(self, direction: str, h: float, fine: int) -> list[tuple[Family, Array, discretize.Integers]]:
        """Return offsets and points for each family."""
        found = []
        for family in self.families:
            offsets = loss.center(family, direction, h)
            bottom, top = loss.reach(family, direction, self.low, self.high)
            low, high = float(((bottom - offsets) / h).min()), float(((top - offsets) / h).max())
            found.append((family, offsets, discretize.points(low, high, fine)))
        return found

    def rough(self, direction: str) -> Moments:
        """Return the log moments from a grid that resolves every scale by some percent."""
        parts = []
        for family in self.families:
            bottom, top = loss.reach(family, direction, self.low, self.high)
            h = float(np.maximum(top, -bottom).max()) * 2.0**-22
            offsets = loss.center(family, direction, h)
            grid = discretize.points(float(((bottom - offsets) / h).min()), float(((top - offsets) / h).max()), 8)
            parts.append(discretize.upper(family, direction, h, offsets, grid))
        return Moments(parts)


def problem(found: Phases, log_delta: float) -> Problem:
    """Return the problem of phases whose mu is finite, for deltas of about that size."""
    steps = list(found.steps)
    if found.mu > 0.0:
        steps.append((PoissonStep(((1.0, 1.0, 1.0 / found.mu),)), 1))
    families = tuple(loss.families(steps))
    count = int(sum(family.counts.sum() for family in families))
    one_sided = all(family.subset or bool(np.all(family.rates == 1.0)) for family in families)
    low = -float(ndtri_exp(math.log(1e-10) - math.log(count)))
    high = -float(ndtri_exp(min(log_delta, math.log(1e-3)) - math.log(1e7) - math.log(count)))
    return Problem(families, count, ("remove",) if one_sided else ("remove", "add"), low, high)


def saddle(moments: Moments, log_delta: float) -> float:
    """Return the tilt at which delta is about the given one, by the saddle-point formula.

    delta(K'(t)) is about exp(K - t K')/(t (1 + t) sqrt(2 pi K'')), which decreases in t.
    """
    # A bounded loss has no tilt with so small a delta. No loss here has lighter tails than a normal one of a tenth its
    # size.
    plain = _plain(moments) ** 2
    largest = 20.0 * (3.0 + math.sqrt(-2.0 * log_delta)) / math.sqrt(plain)

    def above(theta: float) -> bool:
        value, mean, variance = moments(theta)
        if theta > largest or variance < 1e-4 * plain:
            return False
        spread = math.log(theta) + math.log1p(theta) + 0.5 * math.log(2.0 * math.pi * max(variance, 1e-300))
        return value - theta * mean - max(spread, math.log(2.0)) > log_delta

    return _bisect(above)


def tilt_at(moments: Moments, epsilon: float) -> float:
    """Return the tilt at which the mean is epsilon, 0 where it is larger without one."""
    if moments(0.0)[1] >= epsilon:
        return 0.0
    largest = 1e3 / _plain(moments)
    return _bisect(lambda theta: theta < largest and moments(theta)[1] < epsilon)


def _plain(moments: Moments) -> float:
    """Return the standard deviation of the loss without a tilt, bounded away from 0."""
    _, mean, variance = moments(0.0)
    return max(math.sqrt(variance), 1e-3 * abs(mean), 1e-100)


def _bisect(grow: Callable[[float], bool]) -> float:
    low, high = 0.0, 2.0  # of log theta
    while low > -40.0 and not grow(math.exp(low)):
        low, high = low - 4.0, low
    while high < 60.0 and grow(math.exp(high)):
        low, high = high, high + 4.0
    while high - low > 0.02:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if grow(math.exp(middle)) else (low, middle)
    return math.exp(0.5 * (low + high))


@dataclass(eq=False)
class Side:
    """One direction: where it is looked at, the step of its grid, and the best upper end so far."""

    direction: str
    rough: Moments
    theta: float
    h: float
    reference: float = 0.0
    spread: float = 0.0
    upper: float = math.inf
    size: int = 0
    aimed: bool = False

    def misses(self) -> bool:
        """Whether the epsilon found is off the tilted mean, and the tilt still the first guess."""
        return not self.aimed and abs(self.upper - self.reference) > 0.25 * self.spread

    def step(self, coarse: float, steps: int) -> float:
        """Return the step of the grid: `coarse` standard deviations of a step's tilted loss."""
        plain = _plain(self.rough)  # far in a heavy tail, the thick part has to be resolved as well
        least = 24.0 * self.spread / 2**18  # leaves room to refine
        return min(2.0, max(least, coarse * min(max(self.spread, 0.05 * plain), 12.0 * plain) / math.sqrt(steps)))

    def aim(self, theta: float) -> None:
        """Set the tilt, and with it the loss of interest."""
        _, mean, variance = self.rough(theta)
        self.theta, self.reference, self.spread = theta, mean, math.sqrt(variance)

    def curves(self, task: Problem, fine: int) -> tuple[Curve, Callable[[], Curve]]:
        """Return the upper curve, and a function that computes the lower one."""
        grids = task.grids(self.direction, self.h, fine)
        above = [discretize.upper(family, self.direction, self.h, at, grid) for family, at, grid in grids]

        def below() -> Curve:
            parts = [
                discretize.lower(family, self.direction, self.h, at, grid, part.p)
                for (family, at, grid), part in zip(grids, above, strict=True)
            ]
            return compose(Moments(parts), self.theta, upper=False, eta=task.eta)

        return compose(Moments(above), self.theta, upper=True, eta=task.eta), below


def start(task: Problem, choose: Callable[[Moments], float]) -> list[Side]:
    """Return the directions with their first tilts and grid steps."""
    sides = []
    for direction in task.directions:
        rough = task.rough(direction)
        side = Side(direction, rough, 0.0, 0.0)
        side.aim(choose(rough))
        side.h = side.step(task.coarse, task.steps)
        sides.append(side)
    return sides


def refine(
    task: Problem,
    sides: Sequence[Side],
    read: Callable[[Curve], float],
    tolerance: Callable[[Interval], float],
    *,
    retilt: bool,
) -> Interval:
    """Return bounds on the largest `read`, 0 or more, over the directions, refined until the tolerance is met.

    With `retilt`, what is read is an epsilon, and a direction whose epsilon turns out not to be the one that its tilt
    suits is tilted anew, once.
    """
    lower, coarse, last, stuck = 0.0, task.coarse, math.inf, 0
    best = Interval(0.0, math.inf)
    for _ in range(_ROUNDS):
        fine = max(8, math.ceil(2.8 / coarse))
        leader, below = None, None
        for side in sides:
            if side.upper <= lower:
                continue  # the other direction is certainly the worse one
            curve, later = side.curves(task, fine)
            side.upper, side.size = min(side.upper, max(0.0, read(curve))), curve.size
            if leader is None or side.upper > leader.upper:
                leader, below = side, later
        if leader is None or below is None:
            break
        upper = max(side.upper for side in sides)
        if upper > 0.0:
            lower = max(lower, min(upper, read(below())))
        best = Interval(lower, upper)
        wanted = tolerance(best)
        stuck = stuck + 1 if best.gap > 0.9 * last else 0
        if best.gap <= wanted or stuck == 2:
            break  # met, or rounding is what is left
        last = best.gap
        factor = min(0.7, max(0.15, 0.9 * math.sqrt(wanted / best.gap)))
        factor = max(factor, max(side.size for side in sides if side.upper > lower) / MOST_POINTS)
        if factor > 0.9:
            break
        moved = [side for side in sides if retilt and side.misses() and side.upper > lower]
        for side in moved:
            side.aim(tilt_at(side.rough, side.upper))
            side.aimed = True
        if moved:
            factor, last = max(0.5, factor), math.inf
        coarse *= factor
        for side in sides:
            side.h = side.step(coarse, task.steps) if side in moved else side.h * factor
    return best
