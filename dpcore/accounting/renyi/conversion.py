"""Conversion of Renyi differential privacy to (epsilon, delta) and back.

Let L be the privacy loss and R(alpha) bound the Renyi divergence of order alpha > 1. Then, for every alpha,

    delta(eps) <= exp((alpha - 1)(R - eps)) * (1 - 1/alpha)^(alpha - 1) / alpha
               =  exp((alpha - 1)(R - eps + log(1 - 1/alpha)) - log alpha)                               (improved)
    delta(0)   <= sqrt(1 - exp(-R))                                                                      (KL)

The first follows from delta(eps) = E[max(0, 1 - exp(eps - L))] and max(0, 1 - e^(-x)) <= e^((alpha-1) x) max_y ((1 -
e^-y) e^(-(alpha-1) y)), whose maximum lies at e^-y = 1 - 1/alpha. The second is the Bretagnolle-Huber inequality, with
KL <= R at any order above 1; it is what lets a divergence of almost nothing cost epsilon = 0.

References
----------
Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", 2020, Proposition 12.
Asoodeh, Liao, Calmon, Kosut, Sankar, "A Better Bound Gives a Hundred Rounds: Enhanced Privacy Guarantees via
f-Divergences", 2020, equation 20 (of its first version on arXiv).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def epsilon_from_rdp(orders: Array, rdp: Array, delta: float) -> float:
    """Return the smallest epsilon over the orders, each above 1.

    `rdp` (m,) bounds the divergence at the orders: 0 or more, possibly infinity.
    """
    bound = rdp + np.log1p(-1.0 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1.0)
    bound = np.where(delta * delta > -np.expm1(-rdp), 0.0, bound)
    return max(0.0, float(bound.min()))


def delta_from_rdp(orders: Array, rdp: Array, epsilon: float) -> float:
    """Return the smallest delta over the orders, at most 1; the inverse of `epsilon_from_rdp`."""
    logs = np.minimum(log_delta_by_kl(rdp), log_delta_improved(orders, rdp, epsilon))
    return math.exp(min(0.0, float(logs.min())))


def log_delta_improved(orders: Array, rdp: Array, epsilon: float) -> Array:
    """Return the logarithm of the improved bound on delta at each order."""
    return np.asarray((orders - 1.0) * (rdp - epsilon + np.log1p(-1.0 / orders)) - np.log(orders))


def log_delta_by_kl(rdp: Array) -> Array:
    """Return the logarithm of the bound on delta(0) at each order; -inf without a divergence."""
    with np.errstate(divide="ignore"):
        return np.asarray(0.5 * np.log(-np.expm1(-rdp)))
