"""Renyi differential privacy of the events, and the accountant built on it.

A schedule has thousands of different steps, and is asked at as few orders as lead to the best one.
With K(alpha) the sum of the steps' log A (convex in alpha), the bounds of `dpcore.accounting.renyi.conversion` are

    epsilon = (K(alpha) + (alpha - 1) log(1 - 1/alpha) - log alpha - log delta) / (alpha - 1),
    log delta = K(alpha) + (alpha - 1) log(1 - 1/alpha) - log alpha - epsilon (alpha - 1).

(alpha - 1) log(1 - 1/alpha) - log alpha = (alpha - 1) log(alpha - 1) - alpha log alpha has second derivative
1/(alpha - 1) - 1/alpha > 0. So log delta is convex in alpha; and {epsilon <= e} = {convex function <= e (alpha - 1)} is
an interval, so epsilon has no local minimum but the least. The search walks down along the orders, in ever smaller
strides. Whichever order it ends at, its bound holds. The bounds by Kullback-Leibler divergence get better with smaller
alpha, so they are asked for at the smallest order only.

Its steps are evaluated together at one order (`moments.log_moments_of_many`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from dpcore.accounting.events import Event
from dpcore.accounting.phases import AllocationStep, Phases, PoissonStep, Step, demand_phases, phases
from dpcore.accounting.renyi import conversion, moments
from dpcore.accounting.renyi.allocation import log_moments_allocation
from dpcore.accounting.renyi.without_replacement import log_moments_without_replacement

Array = npt.NDArray[np.float64]

# A superset of dp-accounting's default orders (1.1 to 10.9 by 0.1, 11 to 63, 128, 256, 512, 1024), so that the minimum
# over them is never above its; finer below 1.1 for large epsilons, and above 63 for small ones.
DEFAULT_ORDERS: tuple[float, ...] = tuple(
    sorted(
        {1.0 + x / 10.0 for x in range(1, 100)}
        | {1.01, 1.025, 1.05, 1.075, 1.15, 1.25, 1.35, 1.45}
        | {float(x) for x in range(11, 257)}
        | {float(x) for x in (288, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 8192)}
    )
)

_FEW = 8  # steps of more kinds than this are a schedule


@dataclass(frozen=True)
class RdpAccountant:
    """Renyi accountant: adds divergences up at each of `DEFAULT_ORDERS`, then takes the best order.

    Notes
    -----
    Guarantee: each epsilon is an upper bound, up to float64 rounding (relative 1e-12).

    Of schedules with many different steps not every order is tried, only those on the way to the best one.
    """

    name = "rdp"
    floor = (
        f"RDP at orders up to {DEFAULT_ORDERS[-1]:g} finds nothing between 0 and "
        f"log(1/({DEFAULT_ORDERS[-1]:g} delta))/{DEFAULT_ORDERS[-1] - 1:g}"
    )

    def supports(self, event: Event) -> bool:
        """Whether every part of the event is of a kind known here."""
        return phases(event) is not None

    def epsilon(self, event: Event, delta: float) -> float:
        """Return the smallest epsilon over the orders."""
        found = demand_phases(event)
        if len(found.steps) > _FEW:
            return schedule_epsilon(found, delta)
        orders = np.array(DEFAULT_ORDERS)
        return conversion.epsilon_from_rdp(orders, event_rdp(event, orders), delta)

    def delta(self, event: Event, epsilon: float) -> float:
        """Return the smallest delta over the orders."""
        found = demand_phases(event)
        if len(found.steps) > _FEW:
            return schedule_delta(found, epsilon)
        orders = np.array(DEFAULT_ORDERS)
        return conversion.delta_from_rdp(orders, event_rdp(event, orders), epsilon)


def event_rdp(event: Event, orders: Array) -> Array:
    """Return a bound on the event's Renyi divergence at each order above 1: (m,) float64, infinity without noise.

    Raises
    ------
    PrivacyError
        If the event is not covered.
    """
    found = demand_phases(event)
    total = gaussian_rdp(found.mu, orders)
    if math.isinf(found.mu):
        return total
    for step, count in found.steps:
        total = total + count * step_rdp(step, orders)
    return total


def gaussian_rdp(mu: float, orders: Array) -> Array:
    """Return the Renyi divergence of N(mu, 1) and N(0, 1) at each order."""
    return orders * (mu * mu / 2.0) if mu > 0.0 else np.zeros_like(orders)


def step_rdp(step: Step, orders: Array) -> Array:
    """Return a bound on the Renyi divergence of one sampled step at each order, (m,) float64, 0 or more.

    A mixture whose component is drawn in the open has exp((alpha - 1) D_alpha) at most the weighted sum of the
    components', since it is an f-divergence of the joint distributions; a component that releases nothing has 1.
    """
    if not isinstance(step, PoissonStep):
        if isinstance(step, AllocationStep):
            log_moment = log_moments_allocation(step.batches, step.noise_multiplier, orders)
        else:
            log_moment = log_moments_without_replacement(step.sample_rate, step.noise_multiplier, orders)
        return np.maximum(0.0, log_moment / (orders - 1.0))
    parts = [
        (weight, gaussian_rdp(1.0 / sigma, orders) if q == 1.0 else poisson_rdp(q, sigma, orders))
        for weight, q, sigma in step.components
    ]
    if len(parts) == 1 and parts[0][0] == 1.0:
        return parts[0][1]
    logs = [np.log(weight) + log_expm1((orders - 1.0) * rdp) for weight, rdp in parts]
    return np.asarray(np.logaddexp(0.0, np.logaddexp.reduce([np.full_like(orders, -np.inf), *logs])) / (orders - 1.0))


def poisson_rdp(sample_rate: float, noise_multiplier: float, orders: Array) -> Array:
    """Return the Renyi divergence of one Poisson-sampled Gaussian step, in both directions, at each order.

    For 0 < sample_rate < 1 and noise_multiplier > 0.

    References
    ----------
    Mironov, Talwar, Zhang 2019, sections 3.2 and 3.3.
    """
    log_moment = np.empty_like(orders)
    whole = orders == np.floor(orders)
    if whole.any():
        integers = tuple(int(order) for order in orders[whole])
        log_moment[whole] = moments.log_moments_integer(sample_rate, noise_multiplier, integers)
    if not whole.all():
        log_moment[~whole] = moments.log_moments_exact(sample_rate, noise_multiplier, orders[~whole])
    return np.maximum(0.0, log_moment / (orders - 1.0))


def schedule_epsilon(found: Phases, delta: float) -> float:
    """Return the smallest epsilon over the orders."""
    if math.isinf(found.mu):
        return math.inf
    sums = ScheduleMoments(found)

    def at(order: float) -> float:
        return conversion.epsilon_from_rdp(np.array([order]), sums.rdp(order), delta)

    return min(at(DEFAULT_ORDERS[0]), _least(at))


def schedule_delta(found: Phases, epsilon: float) -> float:
    """Return the smallest delta over the orders."""
    if math.isinf(found.mu):
        return 1.0
    sums = ScheduleMoments(found)

    def at(order: float) -> float:
        return float(conversion.log_delta_improved(np.array([order]), sums.rdp(order), epsilon)[0])

    by_kl = float(conversion.log_delta_by_kl(sums.rdp(DEFAULT_ORDERS[0]))[0])
    return math.exp(min(0.0, by_kl, _least(at)))


def _least(at: Callable[[float], float]) -> float:
    """Return the least value over the orders, of a function without other local minima."""
    value, count = cache(lambda index: at(DEFAULT_ORDERS[index])), len(DEFAULT_ORDERS)
    best = DEFAULT_ORDERS.index(16.0)
    stride = 64
    while stride > 0:
        near = [index for index in (best - stride, best + stride) if 0 <= index < count]
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
            total += count * (order - 1.0) * float(step_rdp(step, np.array([order]))[0])
        if self._counts.size == 0:
            return total
        logs = order * (order - 1.0) / (2.0 * self._sigmas * self._sigmas)
        sampled = self._rates < 1.0
        logs[sampled] = moments.log_moments_of_many(self._rates[sampled], self._sigmas[sampled], order)
        if self._counts.size < self._weights.size or np.any(self._weights < 1.0):
            # A mixture's A - 1 is the weighted sum of its components' (`step_rdp`).
            logs = np.logaddexp(0.0, np.logaddexp.reduceat(np.log(self._weights) + log_expm1(logs), self._starts))
        return total + float(self._counts @ np.maximum(0.0, logs))


def log_expm1(x: Array) -> Array:
    """Return log(exp(x) - 1) of x >= 0, without overflow; -inf at 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(x + np.log(-np.expm1(-x)))
