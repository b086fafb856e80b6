"""Renyi accounting of schedules: thousands of different steps, at as few orders as lead to the best one.

With K(alpha) the sum of the steps' log A (convex in alpha), the bounds of `dpcore.accounting.renyi.conversion` are

    epsilon = (K(alpha) + (alpha - 1) log(1 - 1/alpha) - log alpha - log delta) / (alpha - 1),
    log delta = K(alpha) + (alpha - 1) log(1 - 1/alpha) - log alpha - epsilon (alpha - 1).

(alpha - 1) log(1 - 1/alpha) - log alpha = (alpha - 1) log(alpha - 1) - alpha log alpha has second derivative
1/(alpha - 1) - 1/alpha > 0. So log delta is convex in alpha; and {epsilon <= e} = {convex function <= e (alpha - 1)} is
an interval, so epsilon has no local minimum but the least. The search walks down along the orders, in ever smaller
strides. Whichever order it ends at, its bound holds. The bounds by Kullback-Leibler divergence get better with smaller
alpha, so they are asked for at the smallest order only.

All steps are evaluated together at one order (`moments.log_moments_of_many`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dpcore.accounting.phases import AllocationStep, Phases, PoissonStep
from dpcore.accounting.renyi import conversion
from dpcore.accounting.renyi.allocation import log_moments_allocation
from dpcore.accounting.renyi.moments import log_moments_of_many
from dpcore.accounting.renyi.without_replacement import log_moments_without_replacement

Array = npt.NDArray[np.float64]


def schedule_epsilon(found: Phases, orders: Sequence[float], delta: float) -> float:
    """Return the smallest epsilon over the orders, ascending and above 1."""
    if math.isinf(found.mu):
        return math.inf
    sums = ScheduleMoments(found)

    def at(order: float) -> float:
        return conversion.epsilon_from_rdp(np.array([order]), sums.rdp(order), delta)[0]

    return min(at(orders[0]), _least(at, orders))


def schedule_delta(found: Phases, orders: Sequence[float], epsilon: float) -> float:
    """Return the smallest delta over the orders, ascending and above 1."""
    if math.isinf(found.mu):
        return 1.0
    sums = ScheduleMoments(found)

    def at(order: float) -> float:
        return float(conversion.log_delta_improved(np.array([order]), sums.rdp(order), epsilon)[0])

    by_kl = float(conversion.log_delta_by_kl(sums.rdp(orders[0]))[0])
    return math.exp(min(0.0, by_kl, _least(at, orders)))


def _least(at: Callable[[float], float], orders: Sequence[float]) -> float:
    """Return the least value over the orders, of a function without other local minima."""
    known: dict[int, float] = {}

    def value(index: int) -> float:
        if index not in known:
            known[index] = at(orders[index])
        return known[index]

    best = min(range(len(orders)), key=lambda index: abs(orders[index] - 16.0))
    stride = 64
    while stride > 0:
        near = [index for index in (best - stride, best + stride) if 0 <= index < len(orders)]
        lower = [index for index in near if value(index) < value(best)]
        if lower:
            best = lower[0]
        else:
            stride //= 2
    return value(best)


class ScheduleMoments:
    """Sums of log A over all steps of a schedule with a finite mu, at any order."""

    def __init__(self, found: Phases) -> None:
        self._half_square = found.mu * found.mu / 2.0
        poisson = [(step, count) for step, count in found.steps if isinstance(step, PoissonStep)]
        self._others = [(step, count) for step, count in found.steps if not isinstance(step, PoissonStep)]
        table = np.array([part for step, _ in poisson for part in step.components]).reshape(-1, 3)
        self._weights, self._rates, self._sigmas = table.T
        sizes = [len(step.components) for step, _ in poisson]
        self._starts = np.concatenate([[0], np.cumsum(sizes[:-1])]).astype(np.int64) if sizes else np.zeros(0, np.int64)
        self._counts = np.array([float(count) for _, count in poisson])

    def rdp(self, order: float) -> Array:
        """Return the divergence of the whole at one order: (1,)."""
        return np.array([self.log_moment(order) / (order - 1.0)])

    def log_moment(self, order: float) -> float:
        """Return K(order): (order - 1) times the divergence of the whole."""
        total = order * (order - 1.0) * self._half_square
        for step, count in self._others:
            if isinstance(step, AllocationStep):
                bound = log_moments_allocation(step.batches, step.noise_multiplier, np.array([order]))
            else:
                bound = log_moments_without_replacement(step.sample_rate, step.noise_multiplier, np.array([order]))
            total += count * max(0.0, float(bound[0]))
        if self._counts.size == 0:
            return total
        logs = order * (order - 1.0) / (2.0 * self._sigmas * self._sigmas)
        sampled = self._rates < 1.0
        logs[sampled] = log_moments_of_many(self._rates[sampled], self._sigmas[sampled], order)
        if self._counts.size < self._weights.size or np.any(self._weights < 1.0):
            # A mixture's A - 1 is the weighted sum of its components' (`rdp.step_rdp`).
            logs = np.logaddexp(0.0, np.logaddexp.reduceat(np.log(self._weights) + log_expm1(logs), self._starts))
        return total + float(self._counts @ np.maximum(0.0, logs))


def log_expm1(x: Array) -> Array:
    """Return log(exp(x) - 1) of x >= 0, without overflow; -inf at 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(x + np.log(-np.expm1(-x)))
