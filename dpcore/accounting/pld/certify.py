"""Certified intervals: an upper and a lower bound on a common grid, refined until they meet.

How fine the grid has to be is found without composing. With K_up and K_low the log moments of both bounds at the tilt
theta, log delta of the one is above that of the other by about K_up(theta) - K_low(theta) at any given epsilon, and
epsilon by that over theta at any given delta (the saddle-point formula; theta itself adds nothing to first order). This
difference has a part of second order in the step of the grid near its center, and a part of second order in one over
the number of points per doubling of the distance from it (`discretize.points`). Both are measured, on a sample of the
steps where there are many.

That only chooses grids. Everything returned is certified, however far apart the ends are; what can keep them apart is
rounding, or the largest transform (2^20 points).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpcore.accounting.pld import discretize
from dpcore.accounting.pld.compose import MOST_POINTS, compose
from dpcore.accounting.pld.deltas import Curve
from dpcore.accounting.pld.moments import Moments, plain, tilt_at
from dpcore.accounting.pld.problem import Problem

_FIRST = 0.085  # standard deviations of a step's loss
_SCOUT = 0.3
_WIDEST = 100.0  # step of a grid: e^h has to be a number
_FINE = 48
_ROUNDS = 10
_LOOKS = 2  # at tails that only show under a tilt


class Interval(NamedTuple):
    """Certified bounds: lower <= the number <= upper; both may be infinity. ``lower, upper = interval``."""

    lower: float
    upper: float

    @property
    def gap(self) -> float:
        """Upper minus lower, 0 where both are the same infinity."""
        return 0.0 if self.lower == self.upper else self.upper - self.lower


@dataclass(eq=False)
class Side:
    """One direction: where it is looked at, its grid, and the best upper end so far."""

    task: Problem
    direction: str
    rough: Moments
    theta: float = 0.0
    reference: float = 0.0
    spread: float = 0.0
    h: float = 0.0
    fine: int = _FINE
    expected: float = math.inf
    upper: float = math.inf
    size: int = 0

    def aim(self, theta: float) -> None:
        """Set the tilt, and with it the loss of interest."""
        _, mean, variance = self.rough(theta)
        self.theta, self.reference, self.spread = theta, mean, math.sqrt(variance)
        self.task = self.task.aimed(theta, mean)

    def step(self, coarse: float) -> float:
        """Return the step of the grid: `coarse` standard deviations of a step's tilted loss."""
        usual = plain(self.rough)  # far in a heavy tail, the thick part has to be resolved as well
        least = 24.0 * self.spread / 2**19  # leaves room to refine
        found: float = coarse * usual * min(6.0, max(0.05, self.spread / usual) ** 0.35) / math.sqrt(self.task.steps)
        return min(2.0, max(least, found))

    def curves(self, task: Problem | None = None, behind: float = 0.0) -> tuple[Curve, Callable[[], Curve]]:
        """Return the upper curve, and a function that computes the lower one, both from `behind` below the mean on."""
        task = self.task if task is None else task
        above, later = self.masses(task)
        # Without a tilt the epsilon of interest may lie anywhere below the mean.
        behind = max(behind, 2.0 * self.spread) if self.theta > 0.0 else math.inf
        upper = compose(Moments(above), self.theta, upper=True, eta=task.eta, behind=behind)
        return upper, lambda: compose(Moments(later()), self.theta, upper=False, eta=task.eta, behind=behind)

    def masses(self, task: Problem) -> tuple[list[discretize.Masses], Callable[[], list[discretize.Masses]]]:
        """Return the masses of the upper bound, and a function that computes those of the lower one."""
        grids = task.grids(self.direction, self.h, self.fine)
        above = [discretize.upper(family, self.direction, self.h, at, grid) for family, at, grid in grids]

        def below() -> list[discretize.Masses]:
            return [
                discretize.lower(family, self.direction, self.h, at, grid, part.p)
                for (family, at, grid), part in zip(grids, above, strict=True)
            ]

        return above, below

    def difference(self, theta: float) -> float:
        """Return how far log delta of both bounds will be apart where the tilted mean is that of theta, about."""
        theta = max(theta, 1e-2 / max(self.spread, plain(self.rough) * 1e-3))
        above, later = self.masses(self.task.sample)
        below = later()
        for high, low in zip(above, below, strict=True):
            # At infinity in the upper bound, where it weighs nothing; with the tilt it would weigh much below.
            low.p[:, -1] = np.maximum(0.0, low.p[:, -1] - high.infinite)
        return abs(Moments(above).log_moment(theta) - Moments(below).log_moment(theta))

    def excess(self) -> float:
        """Return how far the upper epsilon is above the true one on this grid, about: much at millions of steps."""
        if self.theta <= 0.0:
            return 0.0
        above, _ = self.masses(self.task.sample)
        return (Moments(above).log_moment(self.theta) - self.rough.log_moment(self.theta)) / self.theta

    def settle(self, wanted: float, theta: float) -> None:
        """Choose the grid such that the difference at theta will be a little below the one wanted."""
        self.h, self.fine = self.step(_FIRST), _FINE
        most = 0.9 if self.task.sample is self.task else 0.7
        before = h = 0.0
        for count in range(4):
            found = self.difference(theta) / wanted
            large = 16.0 * self.spread / self.h > 1e5  # such transforms cost more than another look
            if found < most and (count > 0 or found > (0.6 if large else 0.3)):
                return
            if count == 0:
                tail = min(0.1, 0.5 * found)
                near = (found - tail) / self.h**2
            elif h == self.h:
                return  # as fine as the largest transform allows
            else:
                near = max(0.0, (before - found) / (h * h - self.h**2))
                tail = max(0.0, found - near * self.h**2)
                if tail > 0.35:
                    self.fine = math.ceil(self.fine * min(8.0, math.sqrt(tail / 0.2)))
                    tail = 0.2
            before, h = near * self.h**2 + tail, self.h
            aim = math.sqrt((0.8 * most - tail) / max(near, 1e-300))
            self.h = max(self.step(0.0), min(2.0 * h, max(0.2 * h, aim)))
            if found < most:
                return


def start(task: Problem, choose: Callable[[Moments], float]) -> list[Side]:
    """Return the directions with their first tilts."""
    sides = []
    for direction in task.directions:
        side = Side(task, direction, task.rough(direction))
        side.aim(choose(side.rough))
        for _ in range(_LOOKS if task.tilts else 0):
            side.rough = side.task.rough(direction)
            side.aim(choose(side.rough))
        sides.append(side)
    return sides


def scout(side: Side, read: Callable[[Curve], float]) -> float:
    """Read the upper curve of a sample on a coarse grid; it is a bound where the sample is everything."""
    side.h, side.fine = min(_WIDEST, max(side.step(_SCOUT), side.spread / 1500.0)), 16
    curve, _ = side.curves(side.task.sample)
    return max(0.0, read(curve))


def refine(
    sides: Sequence[Side], read: Callable[[Curve], float], tolerance: Callable[[Interval], float], *, retilt: bool
) -> Interval:
    """Return bounds on the largest `read`, 0 or more, over the directions, refined until the tolerance is met.

    With `retilt`, what is read is an epsilon, and a direction whose epsilon turns out not to be the one that its tilt
    suits is tilted anew.
    """
    for side in sides:
        side.expected = scout(side, read)
        if side.task.sample is side.task:
            side.upper = side.expected
        if retilt and math.isfinite(side.expected) and abs(side.expected - side.reference) > 0.25 * side.spread:
            side.expected = max(0.0, side.expected - side.excess())
            side.aim(tilt_at(side.rough, side.expected))
    leader = max(sides, key=lambda side: side.expected)
    wanted = tolerance(Interval(leader.expected, leader.expected))
    share = wanted * leader.theta if retilt else wanted / max(leader.expected, 1e-300)
    leader.settle(min(3.0, max(1e-9, share)), leader.theta)
    for side in sides:
        if side is not leader:
            # It has only to be shown not to be the worse one.
            factor = math.sqrt(max(1.0, 0.5 * (leader.expected - side.expected) / wanted))
            side.h, side.fine = side.step(min(_SCOUT, leader.h / leader.step(1.0) * factor)), leader.fine
    lower = 0.0
    tried: dict[str, float] = {}
    for count in range(_ROUNDS):
        side = max(sides, key=lambda side: (side.upper, side.expected)) if count else leader
        gap, wanted = side.upper - lower, tolerance(Interval(lower, side.upper))
        if count and gap <= wanted:
            break
        if side.direction in tried:
            factor = min(0.7, max(0.15, 0.9 * math.sqrt(wanted / gap)))
            factor = max(factor, side.size / MOST_POINTS)
            if factor > 0.9 or gap > 0.95 * tried[side.direction]:
                break  # the largest transform, or rounding is what is left
            side.h, side.fine = side.h * factor, math.ceil(side.fine / factor)
            tried[side.direction] = gap
        curve, below = side.curves()
        side.upper, side.size = min(side.upper, max(0.0, read(curve))), curve.size
        if side.upper > 0.0 and (not count or side.upper - lower > tolerance(Interval(lower, side.upper))):
            lower = max(lower, min(side.upper, read(below())))
        tried.setdefault(side.direction, math.inf)
    return Interval(lower, max(side.upper for side in sides))
