"""Renyi differential privacy of the events, and the accountant built on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpcore import validate
from dpcore.accounting import conversion, moments, series
from dpcore.accounting.events import Composed, Event, Gaussian, MatrixGaussian, NonPrivate, PoissonSampledGaussian
from dpcore.errors import ArgumentError

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


@dataclass(frozen=True)
class RdpAccountant:
    """Renyi accountant: adds divergences up at each order, then takes the best order.

    Parameters
    ----------
    orders : tuple of float or None
        Orders to minimize over, each above 1. None takes `DEFAULT_ORDERS`.
    fractional : {"exact", "series"} or None
        How a fractional order of the Poisson-subsampled Gaussian is evaluated: "exact" by quadrature, or "series", the
        looser upper bound that dp-accounting computes. None means "exact" with the default orders and "series" with
        orders given, so that giving dp-accounting's orders gives dp-accounting's figures. Integer orders are exact
        either way.

    Notes
    -----
    Guarantee: each epsilon is an upper bound, up to float64 rounding (relative 1e-12), whatever the orders.
    """

    orders: tuple[float, ...] | None = None
    fractional: str | None = None

    def __post_init__(self) -> None:
        if self.orders is not None:
            values = tuple(validate.number(orders=order) for order in self.orders)
            if not values:
                raise ArgumentError("orders=(): must hold at least one order above 1")
            for order in values:
                if order <= 1.0:
                    raise ArgumentError(f"orders={order!r}: every order must be greater than 1")
            object.__setattr__(self, "orders", values)
        default = "exact" if self.orders is None else "series"
        wanted = default if self.fractional is None else self.fractional
        object.__setattr__(self, "fractional", validate.choice(["exact", "series"], fractional=wanted))

    @property
    def name(self) -> str:
        """The name "rdp"."""
        return "rdp"

    @property
    def floor(self) -> str:
        """Why a small epsilon may stay out of reach."""
        largest = max(self.orders or DEFAULT_ORDERS)
        return f"RDP at orders up to {largest:g} finds nothing between 0 and log(1/({largest:g} delta))/{largest - 1:g}"

    def supports(self, event: Event) -> bool:
        """Whether it is Gaussian, Poisson-sampled Gaussian, a matrix mechanism, not private, or composed of these."""
        if isinstance(event, Composed):
            return all(self.supports(part) for part in event.events)
        return isinstance(event, Gaussian | MatrixGaussian | PoissonSampledGaussian | NonPrivate)

    def rdp(self, event: Event) -> Array:
        """Return the divergence bound at each order, (m,) float64, infinity without noise."""
        orders = np.array(self.orders or DEFAULT_ORDERS)
        return self._rdp(event, orders)

    def _rdp(self, event: Event, orders: Array) -> Array:
        if isinstance(event, Composed):
            return sum((self._rdp(part, orders) for part in event.events), np.zeros_like(orders))
        if isinstance(event, NonPrivate):
            return np.full_like(orders, np.inf)
        if isinstance(event, Gaussian):
            return _gaussian(event.noise_multiplier, event.count, orders)
        if isinstance(event, MatrixGaussian):
            with np.errstate(over="ignore"):
                return orders * (np.float64(event.mu) ** 2 / 2.0)
        if isinstance(event, PoissonSampledGaussian):
            if event.sample_rate == 1.0 or event.steps == 0 or event.noise_multiplier == 0.0:
                return _gaussian(event.noise_multiplier, event.steps, orders)
            how = self.fractional or "exact"
            return event.steps * poisson_rdp(event.sample_rate, event.noise_multiplier, orders, how)
        raise NotImplementedError(f"{type(event).__name__} has no RDP bound here")

    def epsilon(self, event: Event, delta: float) -> float:
        """Return the smallest epsilon over the orders."""
        return conversion.epsilon_from_rdp(np.array(self.orders or DEFAULT_ORDERS), self.rdp(event), delta)[0]

    def delta(self, event: Event, epsilon: float) -> float:
        """Return the smallest delta over the orders."""
        return conversion.delta_from_rdp(np.array(self.orders or DEFAULT_ORDERS), self.rdp(event), epsilon)[0]


def _gaussian(noise_multiplier: float, count: int, orders: Array) -> Array:
    if count == 0:
        return np.zeros_like(orders)
    if noise_multiplier == 0.0:
        return np.full_like(orders, np.inf)
    with np.errstate(over="ignore"):
        return orders * (count / (2.0 * np.float64(noise_multiplier) ** 2))


def poisson_rdp(sample_rate: float, noise_multiplier: float, orders: Array, fractional: str = "exact") -> Array:
    """Return the Renyi divergence of one Poisson-sampled Gaussian step at each order.

    Parameters
    ----------
    sample_rate, noise_multiplier : float
        0 < sample_rate < 1 and noise_multiplier > 0.
    orders : (m,) float64
        Orders above 1.
    fractional : {"exact", "series"}
        See `RdpAccountant`.

    Returns
    -------
    (m,) float64
        Divergences of both directions of add-remove, 0 or more.

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
        evaluate = moments.log_moments_exact if fractional == "exact" else series.log_moments_series
        log_moment[~whole] = evaluate(sample_rate, noise_multiplier, orders[~whole])
    return np.maximum(0.0, log_moment / (orders - 1.0))
