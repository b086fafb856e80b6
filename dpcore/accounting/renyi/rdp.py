"""Renyi differential privacy of the events, and the accountant built on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpcore.accounting.events import Event
from dpcore.accounting.phases import AllocationStep, Step, WithoutReplacementStep, demand_phases, phases
from dpcore.accounting.renyi import conversion, moments
from dpcore.accounting.renyi.allocation import log_moments_allocation
from dpcore.accounting.renyi.schedules import log_expm1, schedule_delta, schedule_epsilon
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

    Of schedules with many different steps not every order is tried, only those on the way to the best one
    (`dpcore.accounting.renyi.schedules`).
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
            return schedule_epsilon(found, DEFAULT_ORDERS, delta)
        orders = np.array(DEFAULT_ORDERS)
        return conversion.epsilon_from_rdp(orders, event_rdp(event, orders), delta)[0]

    def delta(self, event: Event, epsilon: float) -> float:
        """Return the smallest delta over the orders."""
        found = demand_phases(event)
        if len(found.steps) > _FEW:
            return schedule_delta(found, DEFAULT_ORDERS, epsilon)
        orders = np.array(DEFAULT_ORDERS)
        return conversion.delta_from_rdp(orders, event_rdp(event, orders), epsilon)[0]


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
    if isinstance(step, WithoutReplacementStep):
        log_moment = log_moments_without_replacement(step.sample_rate, step.noise_multiplier, orders)
        return np.maximum(0.0, log_moment / (orders - 1.0))
    if isinstance(step, AllocationStep):
        log_moment = log_moments_allocation(step.batches, step.noise_multiplier, orders)
        return np.maximum(0.0, log_moment / (orders - 1.0))
    parts = [(weight, _component(q, sigma, orders)) for weight, q, sigma in step.components]
    if len(parts) == 1 and parts[0][0] == 1.0:
        return parts[0][1]
    logs = [np.log(weight) + log_expm1((orders - 1.0) * rdp) for weight, rdp in parts]
    return np.asarray(np.logaddexp(0.0, np.logaddexp.reduce([np.full_like(orders, -np.inf), *logs])) / (orders - 1.0))


def _component(q: float, sigma: float, orders: Array) -> Array:
    return gaussian_rdp(1.0 / sigma, orders) if q == 1.0 else poisson_rdp(q, sigma, orders)


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
