"""Moments of an epoch of random allocation: L = (X_1 + ... + X_t) / t, X_i = e^(z_i/s - 1/(2 s^2)) independent.

"Remove", at an integer order a: E_Q L^a, from the exponential generating function of the moments of a sum,

    E (X_1 + ... + X_t)^a / a! = [x^a] (sum_j E[X^j] x^j / j!)^t,     E X^j = e^(j (j - 1) / (2 s^2)):

positive terms only. "Add": E_Q L^(-b) with b = a - 1. For any l > 0 the function u^(-b) is at most its tangent at l
below l, which together with u^(-b) above is convex, plus u^(-b) below l. The first part is not more than under a law
that is larger in the convex order (`dpcore.accounting.pld.allocation`). The second: L is at least the geometric mean of
the X_i, so E L^(-c) <= e^(c^2 / (2 s^2 t) + c / (2 s^2)), and for c > b

    E[L^(-b); L < l] <= l^(c - b) E L^(-c),     least at c = s^2 t k,  k = -log l - 1/(2 s^2).

l is chosen such that this is below e^-40. Above order 256, and wherever it is less, there is the divergence of the
Gaussian mechanism in which the example always takes part. The logs of both moments are convex in the order and 0 at
order 1: a fractional order gets the chord.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpcore.accounting.phases import LEAST_ALLOCATED
from dpcore.accounting.pld.allocation import FAR
from dpcore.accounting.pld.lognormal_sum import ranges, transformed
from dpcore.spec import special

Array = npt.NDArray[np.float64]

_MOST = 256
_NEGLIGIBLE = 40.0
_SIZE = 1 << 15


def log_moments_allocation(batches: int, sigma: float, orders: Array) -> Array:
    """Return upper bounds on (order - 1) times the divergence of an epoch, of both directions, at orders above 1."""
    whole = orders * (orders - 1.0) / (2.0 * sigma**2)
    if sigma < LEAST_ALLOCATED:
        return whole
    known = np.concatenate([[0.0], np.maximum(_remove(batches, sigma), _add(batches, sigma))])
    inside = orders <= _MOST
    whole[inside] = np.minimum(whole[inside], np.interp(orders[inside], np.arange(1.0, _MOST + 1), known))
    return whole


@lru_cache(maxsize=64)
def _remove(t: int, sigma: float) -> Array:
    """Return log E L^a for a = 2 .. 256."""
    j = np.arange(_MOST + 1.0)
    logs = j * (j - 1.0) / (2.0 * sigma**2) - special.gammaln(j + 1.0)
    power = np.where(j == 0.0, 0.0, -np.inf)
    for digit in bin(t)[2:]:
        power = _product(power, power)
        if digit == "1":
            power = _product(power, logs)
    result: Array = (power + special.gammaln(j + 1.0) - j * math.log(t))[2:]
    return result


def _product(first: Array, second: Array) -> Array:
    """Return the log coefficients of the product of two series."""
    from scipy.linalg import toeplitz

    table = toeplitz(second, np.full(len(second), -np.inf)) + first
    result: Array = special.logsumexp(table, axis=1)
    return result


@lru_cache(maxsize=64)
def _add(t: int, sigma: float) -> Array:
    """Return a bound on log E L^(1 - a) for a = 2 .. 256."""
    result = np.empty(_MOST - 1)
    values, plain = _masses(t, sigma, 0.0)
    losses, mass = -np.log(np.maximum(values, 1e-300) / t), plain
    for place, b in enumerate(range(1, _MOST)):
        if b & (b - 1) == 0:  # a tilt for all orders up to twice its own; each law bounds the same masses
            mass = np.minimum(plain, _masses(t, sigma, -b / t)[1])
        spread = sigma**2 * t
        k = (b + math.sqrt(b * b + 2.0 * spread * (_NEGLIGIBLE + 0.5 * b / sigma**2))) / spread
        least = -k - 0.5 / sigma**2  # log l
        inside = losses <= -least
        above = b * losses[inside] + np.log(np.maximum(mass[inside], 1e-300))
        below = -b * least + math.log1p(b) + math.log(max(float(mass[~inside].sum()), 1e-300))
        result[place] = special.logsumexp(np.append(above, [below, -_NEGLIGIBLE]))
    return result


def _masses(t: int, sigma: float, rate: float) -> tuple[Array, Array]:
    """Return values of the sum, and upper bounds on their masses in a larger convex order."""
    values, mass = [], []
    for low, high in ranges(t, sigma, FAR * t):
        found = transformed(t, sigma, low, high, rate, _SIZE, lower=False, add=True, last=high == FAR * t)
        here = found.plain(np.maximum(found.sums, 0.0) + found.error)
        here[-1] += found.beyond
        values.append(found.values)
        mass.append(here)
    return np.concatenate(values), np.concatenate(mass)
