"""Moments of the Gaussian on a subset of fixed size, drawn without replacement, under replace-one.

With noise multiplier s relative to the sensitivity under replacement and q = batch size / data set size, and with r the
likelihood ratio of N(1, s^2) to N(0, s^2), so that

    M_k = E[r^k] = exp((k^2 - k) / (2 s^2)),    B_l = E[(r - 1)^l]  (l even),

Theorem 27 of Wang, Balle and Kasiviswanathan bounds A(alpha) = exp((alpha - 1) D_alpha) at integer alpha:

    A <= 1 + q^2 binom(alpha, 2) min(4 (M_2 - 1), 2 M_2)
           + sum_{j=3..alpha} q^j binom(alpha, j) min(4 sqrt(B_{2 floor(j/2)} B_{2 ceil(j/2)}), 2 M_j).

Above order 256 only 2 M_j is used, as in dp-accounting 0.6, so that both give the same figures. A fractional order gets
the chord between the integers around it (log A is convex, and 0 at order 1; Corollary 10).

B_l by differences of M_k loses all digits where s is large. Here it is the integral of a function that is positive:

    B_l = E_{z ~ N(0, 1)}[(exp(w) - 1)^l],   w = z/s - 1/(2 s^2).

On either side of w = 0 the logarithm of the integrand is concave with a second derivative of at most -1, and its peaks
lie between -(sqrt(l) + 1) and l/s + sqrt(l) + 1: 14 beyond them leaves out exp(-98). At height d above the real line it
is at most about exp(d^2) times as large as on it, so the trapezoidal rule with step h has relative error
exp(-(pi/h)^2).

For s^2 <= 1/log 4 the minimum is 2 M_j at every j > 2 and no integral is needed: by Bernoulli (r - 1)^l >= r^l - l
r^(l-1), so B_l >= M_l (1 - l exp(-(l-1)/s^2)) >= M_l / 2, and sqrt(M_{j-1} M_{j+1}) >= M_j.

References
----------
Wang, Balle, Kasiviswanathan, "Subsampled Renyi Differential Privacy and Analytical Moments Accountant", 2019,
Theorem 27 and Corollary 10.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpcore.accounting.renyi.moments import binomial_terms
from dpcore.spec import special

Array = npt.NDArray[np.float64]

_MOST = 256  # the last order with B_l
_NODE_STEP = 0.25
_REACH = 14.0


def log_moments_without_replacement(q: float, sigma: float, orders: Array) -> Array:
    """Return upper bounds on log A at orders above 1, for 0 < q < 1 and sigma > 0."""
    below = np.floor(orders)
    left = np.zeros_like(orders)  # log A(1) = 0
    left[below > 1.0] = _at_integers(q, sigma, below[below > 1.0])
    right = left.copy()
    fractional = orders > below
    right[fractional] = _at_integers(q, sigma, below[fractional] + 1.0)
    return np.asarray(left + (orders - below) * (right - left))


def _at_integers(q: float, sigma: float, orders: Array) -> Array:
    result = np.empty_like(orders)
    for chosen in (orders <= _MOST, orders > _MOST):
        if chosen.any():
            alphas = tuple(int(order) for order in orders[chosen])
            k, _, log_binomial, starts = binomial_terms(alphas)
            bounds = _log_bounds(sigma, max(alphas))
            terms = log_binomial + k * math.log(q) + bounds[k - 2]
            peak = np.maximum.reduceat(terms, starts)
            sums = np.add.reduceat(np.exp(terms - np.repeat(peak, np.diff(starts, append=terms.size))), starts)
            result[chosen] = np.logaddexp(0.0, peak + np.log(sums))
    return result


def _log_bounds(sigma: float, largest: int) -> Array:
    """Return the logarithms of the minima in the sum, for j = 2..largest."""
    j = np.arange(2.0, largest + 1.0)
    bounds = math.log(2.0) + j * (j - 1.0) / (2.0 * sigma * sigma)
    growth = 1.0 / (sigma * sigma)
    bounds[0] = min(bounds[0], math.log(4.0) + growth + math.log(-math.expm1(-growth)))
    if largest <= _MOST and growth < math.log(4.0):
        even = _log_even_moments(sigma)  # of l = 2, 4, ...
        low, high = even[j.astype(int) // 2 - 1], even[(j.astype(int) + 1) // 2 - 1]
        bounds[1:] = np.minimum(bounds[1:], math.log(4.0) + 0.5 * (low + high)[1:])
    return bounds


@lru_cache(maxsize=4096)
def _log_even_moments(sigma: float) -> Array:
    """Return log B_l for l = 2, 4, ..., 256."""
    powers = np.arange(2.0, _MOST + 1.0, 2.0)
    low = -(math.sqrt(_MOST) + 1.0 + _REACH)
    high = _MOST / sigma - low
    z = low + _NODE_STEP * np.arange(math.ceil((high - low) / _NODE_STEP) + 1, dtype=np.float64)
    w = z / sigma - 0.5 / (sigma * sigma)
    with np.errstate(divide="ignore"):
        log_size = np.maximum(w, 0.0) + np.log(-np.expm1(-np.abs(w)))  # of exp(w) - 1
    log_weight = -0.5 * z * z - 0.5 * math.log(2.0 * math.pi) + math.log(_NODE_STEP)
    return np.asarray(special.logsumexp(powers[:, None] * log_size + log_weight, axis=1))
