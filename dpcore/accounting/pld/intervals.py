"""Certified epsilon and delta of events."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from dpcore.accounting.events import Event
from dpcore.accounting.gaussian import MOST, gaussian_epsilon, log_delta, rounding
from dpcore.accounting.phases import LEAST_ALLOCATED, AllocationStep, Phases, PoissonStep, demand_phases, phases
from dpcore.accounting.pld import loss
from dpcore.accounting.pld.allocation import Allocation, Losses
from dpcore.accounting.pld.compose import MOST_POINTS, Curve, Moments, compose, plain, saddle, tilt_at
from dpcore.accounting.pld.loss import Array, Family, center
from dpcore.errors import ArgumentError
from dpcore.spec import special, validate

# The composition to compute, and the tails to cut.


_SAMPLE = 24  # distinct steps that an estimate looks at
_RARE = 1e-5  # of delta: losses of an epoch that may count as infinite


@dataclass(frozen=True)
class Problem:
    """All steps of an event, how many there are, and the directions that differ.

    A step's outcomes are resolved up to the standard normal quantiles `low` and `high`. `inexact` is the relative error
    that its weights and rates bring with them.
    """

    families: tuple[Losses, ...]
    steps: int
    directions: tuple[str, ...]
    low: float
    high: float
    inexact: float = 0.0

    @property
    def eta(self) -> float:
        """Bound on the error of the curve of a step relative to the P-mass above, from that of ndtr in its tail.

        Outcomes are evaluated up to `high` away from either center, which are 1/sigma apart; past 39 all is 0. At x,
        the rounding of x by 2 u changes the tail by 2 u x^2; ndtr and the other operations add some 10 u. That is no
        proof: these functions have no proven errors. Against 60 digits, the largest measured error was a sixteenth of
        this bound.
        """
        apart = max(float((1.0 / family.sigmas).max()) for family in self.families)
        long = max((family.batches for family in self.families if isinstance(family, Allocation)), default=0)
        terms = 256.0 + 64.0 * long  # of a sum, each with some roundings of its own
        return self.inexact + (terms + 16.0 * min(39.0, max(self.low, self.high) + apart) ** 2) * 2.0**-52

    @property
    def tilts(self) -> bool:
        """Whether the masses of a step are known the better, the nearer the tilt is to that of the composition."""
        return any(isinstance(family, Allocation) for family in self.families)

    @cached_property
    def sample(self) -> "Problem":
        """A problem of few distinct steps that is about the same; this one if it has few.

        Steps are drawn evenly along their shares of the sum of chi-squared divergences, which describes a composition
        to first order, and counted such that each draw represents an equal share. For estimates, not bounds.
        """
        shares = [family.counts * _divergences(family) for family in self.families]
        if sum(map(len, shares)) <= _SAMPLE:
            return self
        total = float(sum(share.sum() for share in shares))
        before, sampled = 0.0, []
        for family, share in zip(self.families, shares, strict=True):
            ends = before + np.cumsum(share)
            first, last = math.ceil(before / total * _SAMPLE - 0.5), math.ceil(float(ends[-1]) / total * _SAMPLE - 0.5)
            draws = np.searchsorted(ends, (np.arange(first, last) + 0.5) * total / _SAMPLE)
            before = float(ends[-1])
            chosen, times = np.unique(np.minimum(draws, len(share) - 1), return_counts=True)
            if len(chosen):
                each = times * (total / _SAMPLE) / share[chosen]
                counts = np.maximum(1, np.rint(each * family.counts[chosen])).astype(np.int64)
                sampled.append(family.of(chosen, counts))
        exact = [family for family in sampled if isinstance(family, Family)]
        others = [family for family in sampled if not isinstance(family, Family)]
        return replace(self, families=(*loss.joined(exact), *others))

    def aimed(self, theta: float, loss: float) -> "Problem":
        """Return the problem for a tilt, and the loss of all steps together that is the mean under it."""
        return replace(self, families=tuple(family.aimed(theta, loss / self.steps) for family in self.families))

    def grids(self, direction: str, h: float, fine: int) -> list[tuple[Losses, Array, loss.Integers]]:
        """Return offsets and points for each family."""
        fitted = [family.fitted(fine) for family in self.families]
        return [(family, *self._grid(family, direction, h, fine)) for family in fitted]

    def _grid(self, family: Losses, direction: str, h: float, fine: int) -> tuple[Array, loss.Integers]:
        offsets = center(family, direction, h)
        bottom, top = family.reach(direction, self.low, self.high)
        low, high = float(((bottom - offsets) / h).min()), float(((top - offsets) / h).max())
        return offsets, loss.points(low, high, fine)

    def rough(self, direction: str) -> Moments:
        """Return the log moments of the sample, from a grid that resolves every scale by some percent."""
        parts = []
        for family in (part.bounded("rough") for part in self.sample.families):
            bottom, top = family.reach(direction, self.low, self.high)
            h = float(np.maximum(top, -bottom).max()) * 2.0**-22
            parts.append(loss.upper(family, direction, h, *self._grid(family, direction, h, 8)))
        return Moments(parts)


def problem(parts: Phases, log_delta: float) -> Problem:
    """Return the problem of phases whose mu is finite, for deltas of about that size."""
    steps = list(parts.steps)
    if parts.mu > 0.0:
        steps.append((PoissonStep(((1.0, 1.0, 1.0 / parts.mu),)), 1))
    whole = [(step, count) for step, count in steps if isinstance(step, AllocationStep)]
    families: tuple[Losses, ...] = tuple(
        loss.families([(step, count) for step, count in steps if not isinstance(step, AllocationStep)])
    )
    count = int(sum(family.counts.sum() for family in families)) + sum(count for _, count in whole)
    one_sided = not whole and all(family.subset or bool(np.all(family.rates == 1.0)) for family in families)
    low = -float(special.ndtri_exp(math.log(1e-10) - math.log(count)))
    high = -float(special.ndtri_exp(min(log_delta, math.log(1e-3)) - math.log(1e7) - math.log(count)))
    rare = math.log(_RARE) + min(log_delta, math.log(1e-3)) - math.log(count)
    families += tuple(Allocation(step.batches, step.noise_multiplier, np.array([times]), rare) for step, times in whole)
    inexact = max((step.error for step, _ in steps), default=0.0)
    return Problem(families, count, ("remove",) if one_sided else ("remove", "add"), low, high, inexact)


def _divergences(family: Losses) -> Array:
    exponent = np.minimum(1.0 / family.sigmas**2, 300.0)
    divergences: Array = np.maximum((family.weights * family.rates**2 * np.expm1(exponent)).sum(axis=1), 1e-300)
    return divergences


# Certified intervals: an upper and a lower bound on a common grid, refined until they meet.
#
# How fine the grid has to be is found without composing. With K_up and K_low the log moments of both bounds at the tilt
# theta, log delta of the one is above that of the other by about K_up(theta) - K_low(theta) at any given epsilon, and
# epsilon by that over theta at any given delta (the saddle-point formula; theta itself adds nothing to first order).
# This difference has a part of second order in the step of the grid near its center, and a part of second order in one
# over the number of points per doubling of the distance from it (`loss.points`). Both are measured, on a sample
# of the steps if there are many.
#
# That only chooses grids. Everything returned is certified, however far apart the ends are. They can stay apart by
# rounding, or by the largest transform (2^20 points).


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
        """Upper minus lower, 0 if both are the same infinity."""
        return 0.0 if self.lower == self.upper else self.upper - self.lower


@dataclass(eq=False)
class Side:
    """One direction: its tilt, its grid, and the best upper end so far."""

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
        width: float = coarse * usual * min(6.0, max(0.05, self.spread / usual) ** 0.35) / math.sqrt(self.task.steps)
        return min(2.0, max(least, width))

    def curves(self, task: Problem | None = None, behind: float = 0.0) -> tuple[Curve, Callable[[], Curve]]:
        """Return the upper curve, and a function that computes the lower one, both from `behind` below the mean on."""
        task = self.task if task is None else task
        above, later = self.masses(task)
        # Without a tilt the epsilon of interest may be anywhere below the mean.
        behind = max(behind, 2.0 * self.spread) if self.theta > 0.0 else math.inf
        upper = compose(Moments(above), self.theta, upper=True, eta=task.eta, behind=behind)
        return upper, lambda: compose(Moments(later()), self.theta, upper=False, eta=task.eta, behind=behind)

    def masses(self, task: Problem) -> tuple[list[loss.Masses], Callable[[], list[loss.Masses]]]:
        """Return the masses of the upper bound, and a function that computes those of the lower one."""
        grids = task.grids(self.direction, self.h, self.fine)
        above = [loss.upper(family, self.direction, self.h, at, grid) for family, at, grid in grids]

        def below() -> list[loss.Masses]:
            return [
                loss.lower(family, self.direction, self.h, at, grid, part.p)
                for (family, at, grid), part in zip(grids, above, strict=True)
            ]

        return above, below

    def difference(self, theta: float) -> float:
        """Return about how far log delta of both bounds will be apart if the tilted mean is that of theta."""
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
            ratio = self.difference(theta) / wanted
            large = 16.0 * self.spread / self.h > 1e5  # such transforms cost more than another look
            if ratio < most and (count > 0 or ratio > (0.6 if large else 0.3)):
                return
            if count == 0:
                tail = min(0.1, 0.5 * ratio)
                near = (ratio - tail) / self.h**2
            elif h == self.h:
                return  # as fine as the largest transform allows
            else:
                near = max(0.0, (before - ratio) / (h * h - self.h**2))
                tail = max(0.0, ratio - near * self.h**2)
                if tail > 0.35:
                    self.fine = math.ceil(self.fine * min(8.0, math.sqrt(tail / 0.2)))
                    tail = 0.2
            before, h = near * self.h**2 + tail, self.h
            aim = math.sqrt((0.8 * most - tail) / max(near, 1e-300))
            self.h = max(self.step(0.0), min(2.0 * h, max(0.2 * h, aim)))
            if ratio < most:
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
    """Read the upper curve of a sample on a coarse grid; it is a bound if the sample has all steps."""
    side.h, side.fine = min(_WIDEST, max(side.step(_SCOUT), side.spread / 1500.0)), 16
    curve, _ = side.curves(side.task.sample)
    return max(0.0, read(curve))


def refine(
    sides: Sequence[Side], read: Callable[[Curve], float], tolerance: Callable[[Interval], float], *, retilt: bool
) -> Interval:
    """Return bounds on the largest `read`, 0 or more, over the directions, refined until the tolerance is met.

    With `retilt`, `read` gives an epsilon, and a direction whose epsilon turns out not to suit its tilt gets a new
    tilt.
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
                break  # the transform is the largest, or only rounding is left
            side.h, side.fine = side.h * factor, math.ceil(side.fine / factor)
            tried[side.direction] = gap
        curve, below = side.curves()
        side.upper, side.size = min(side.upper, max(0.0, read(curve))), curve.size
        if side.upper > 0.0 and (not count or side.upper - lower > tolerance(Interval(lower, side.upper))):
            lower = max(lower, min(side.upper, read(below())))
        tried.setdefault(side.direction, math.inf)
    return Interval(lower, max(side.upper for side in sides))


_LEAST_LOG_DELTA = -692.0  # below 1e-300; further down single masses leave the range of float64
_LEAST_NOISE = 1e-6  # losses are of the order of its inverse square: single ones leave the range of the grid
_MOST_MU = 1e8  # losses are of the order of its square: beyond it float64 does not resolve a unit of their sum
_UNSURE = 100.0  # log of the factor that errors of weights and rates may add to delta: at 700 it leaves float64
_MOST_STEPS = 1 << 40  # their rounding adds half a unit to epsilon; that of 2^48, more than float64's range to delta


def epsilon_interval(event: Event, delta: float, tolerance: float | None = None) -> Interval:
    """Return certified bounds on the smallest epsilon >= 0 at which the event is (epsilon, delta)-private.

    Parameters
    ----------
    event : Event
        The releases.
    delta : float
        0 < delta < 1.
    tolerance : float, optional
        Largest requested gap, upper minus lower: absolute, in units of epsilon. The default is max(1e-3 epsilon, 1e-4).

    Returns
    -------
    Interval
        Holds the epsilon of the event's dominating pairs of distributions, the larger one of both directions. The upper
        end is a valid epsilon of the event. For subsets of fixed size see `dpcore.accounting.pld.loss` for the curve.

    Raises
    ------
    ArgumentError
        If delta is outside (0, 1), the tolerance is not above 0, or the event has more than 2^40 sampled steps.
    PrivacyError
        If the event has a part that is unknown here.

    Notes
    -----
    Rounding in float64 is part of the bounds. Where rounding, the largest grid (2^20 points) or ten rounds of
    refinement miss the tolerance, the bounds found so far are returned, certified all the same. Known: a tolerance
    below 1e-6 epsilon. Rare events at a small epsilon (rate 1.2e-5, noise 0.83, 20,200 steps, delta 2e-11: gap 7e-4 at
    epsilon 0.039). 10^8 steps and more (gap 1.5e-2 epsilon at 2.6e8). Delta of 1e-170 and less. Noise multipliers below
    0.05: the gap is 2e-3 epsilon at 0.01, and the lower end is 0 at 0.001. Below 1e-6, below 0.25 for random
    allocation, and where mu is above 1e8 without sampling, the interval goes from 0 to the epsilon without sampling.

    References
    ----------
    Doroshenko, Ghazi, Kamath, Kumar, Manurangsi, "Connect the Dots", 2022 (upper end); the lower end by merging
    outcomes is derived in `dpcore.accounting.pld.loss`, rounding and truncation in
    `dpcore.accounting.pld.compose`.
    """
    delta = validate.open_unit(delta=delta)
    tolerance = None if tolerance is None else validate.positive(tolerance=tolerance)
    return _epsilon(demand_phases(event), delta, tolerance)


@lru_cache(maxsize=64)
def _epsilon(parts: Phases, delta: float, tolerance: float | None) -> Interval:
    if math.isinf(parts.mu):
        return Interval(math.inf, math.inf)
    parts = merged(parts)
    if not parts.steps:
        if parts.mu == 0.0:
            return Interval(0.0, 0.0)
        raised = delta * (1.0 + 4.0 * rounding(parts.mu))  # `gaussian_epsilon` is that of a smaller one, by two
        lower = gaussian_epsilon(min(parts.mu, MOST), min(raised, 1.0 - 1e-16))
        return Interval(lower, gaussian_epsilon(parts.mu, delta))
    if _variation(parts) <= delta:
        return Interval(0.0, 0.0)
    whole = gaussian_epsilon(without_sampling(parts), delta)
    if too_quiet(parts):
        return Interval(0.0, whole)
    target = max(math.log(delta), _LEAST_LOG_DELTA)
    sides = start(problem(parts, target), lambda moments: saddle(moments, target))
    interval = refine(
        sides, lambda curve: curve.epsilon(delta), lambda now: tolerance or max(1e-3 * now.lower, 1e-4), retilt=True
    )
    return Interval(min(interval.lower, whole), min(interval.upper, whole))


def delta_interval(event: Event, epsilon: float, tolerance: float | None = None) -> Interval:
    """Return certified bounds on the smallest delta for which the event is (epsilon, delta)-private.

    Parameters
    ----------
    event : Event
        The releases.
    epsilon : float
        0 or more, finite.
    tolerance : float, optional
        Largest requested gap; the default is 1e-3 delta, however small delta is (down to about 1e-280).

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
def _delta(parts: Phases, epsilon: float, tolerance: float | None) -> Interval:
    if math.isinf(parts.mu):
        return Interval(1.0, 1.0)
    parts = merged(parts)
    if not parts.steps:
        if parts.mu == 0.0:
            return Interval(0.0, 0.0)
        log, slack = log_delta(parts.mu, epsilon), rounding(parts.mu)
        return Interval(math.exp(log - slack), min(1.0, math.exp(log + slack) + 1e-300))
    if too_quiet(parts):
        mu = without_sampling(parts)
        return Interval(0.0, min(1.0, _variation(parts), math.exp(log_delta(mu, epsilon) + rounding(mu)) + 1e-300))
    sides = delta_sides(parts, epsilon)
    interval = refine(
        sides, lambda curve: curve.delta(epsilon), lambda now: tolerance or max(1e-3 * now.lower, 1e-285), retilt=False
    )
    upper = min(interval.upper, _variation(parts))
    return Interval(min(interval.lower, upper), upper)


def _least_noise(parts: Phases) -> float:
    """Return the smallest noise multiplier of a sampled step."""
    return min(sigma for step, _ in parts.steps for *_, sigma in step.components)


def without_sampling(parts: Phases) -> float:
    """Return mu as if everyone took part in every step, which is worse: sampling only helps."""
    return math.hypot(parts.mu, math.sqrt(sum(count for _, count in parts.steps)) / _least_noise(parts))


def too_quiet(parts: Phases) -> bool:
    """Whether some losses are too large for a grid, or their probabilities too uncertain."""
    allocated = [step.noise_multiplier for step, _ in parts.steps if isinstance(step, AllocationStep)]
    beyond = _least_noise(parts) < _LEAST_NOISE or without_sampling(parts) > _MOST_MU
    unsure = sum(count * step.error for step, count in parts.steps) > _UNSURE
    return beyond or unsure or min(allocated, default=math.inf) < LEAST_ALLOCATED


def _variation(parts: Phases) -> float:
    """Return a bound on delta at epsilon 0: that of a step is its total variation, and of several at most their sum.

    That of N(0, s^2) and a mixture that takes N(1, s^2) at rate q is q erf(1/(2 sqrt(2) s)). Far events at tiny rates
    are hard for a grid, and need none when delta is larger than their probability.
    """
    total = math.erf(parts.mu / math.sqrt(8.0))
    for step, count in parts.steps:
        each = (weight * q * math.erf(1.0 / (math.sqrt(8.0) * sigma)) for weight, q, sigma in step.components)
        total += count * math.fsum(each) * (1.0 + step.error)
    return total * (1.0 + 1e-9)


def delta_sides(parts: Phases, epsilon: float) -> list[Side]:
    """Return the directions from which `refine` finds the delta at an epsilon."""
    task = problem(parts, _LEAST_LOG_DELTA)
    expected = _LEAST_LOG_DELTA
    for direction in task.directions:
        rough = task.rough(direction)
        theta = tilt_at(rough, epsilon)
        value, mean, variance = rough(theta)
        # An order below the saddle-point formula, so that the tails are resolved far enough in any case.
        size = math.log1p(theta * (1.0 + theta) * math.sqrt(2.0 * math.pi * variance))
        expected = max(expected, value - theta * max(mean, epsilon) - size - 3.0)
    return start(problem(parts, min(expected, -1.0)), lambda moments: tilt_at(moments, epsilon))


def expected_epsilon(event: Event, delta: float) -> float:
    """Return an approximate epsilon at delta, a few percent off; no bound."""
    parts = demand_phases(event)
    if math.isinf(parts.mu):
        return math.inf
    parts = merged(parts)
    if not parts.steps:
        return gaussian_epsilon(parts.mu, delta)
    if too_quiet(parts):
        return gaussian_epsilon(without_sampling(parts), delta)
    sides = start(problem(parts, math.log(delta)), lambda moments: saddle(moments, math.log(delta)))
    return max(scout(side, lambda curve: curve.epsilon(delta)) for side in sides)


def merged(parts: Phases) -> Phases:
    """Return the phases without steps in which no one takes part; raise if there are too many of the others."""
    steps = tuple((step, count) for step, count in parts.steps if step.components)
    total = sum(count for _, count in steps)
    if total > _MOST_STEPS:
        raise ArgumentError(f"event: has {total} sampled steps: the PLD accountant covers at most 2^40")
    return replace(parts, steps=steps)


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
        return delta_interval(event, epsilon).upper
