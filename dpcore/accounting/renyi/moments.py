"""Moments of the Poisson-subsampled Gaussian.

With noise multiplier s and sample rate q let P = (1-q) N(0, s^2) + q N(1, s^2) and Q = N(0, s^2). Removing one example
turns P into Q (one dimension is enough: both are the same in all directions orthogonal to the example's clipped
vector, and a shorter vector only helps). The Renyi divergence of order alpha is log A(alpha) / (alpha - 1) with

    A(alpha) = E_{z ~ Q}[(1 + u(z))^alpha],   u(z) = q (exp((2z - 1) / (2 s^2)) - 1),   E[u] = 0.

Mironov, Talwar and Zhang (2019, section 3) show that D(P||Q) >= D(Q||P), so A covers both directions of add-remove.
Everything here works with A - 1, whose parts are all positive, so that tiny divergences keep their digits:

- integer alpha: A - 1 = sum_{k=2..alpha} binom(alpha, k) q^k (1-q)^(alpha-k) (exp((k^2 - k)/(2 s^2)) - 1);
- any alpha: A - 1 = E[(1+u)^alpha - 1 - alpha u], by quadrature.

For sigma >= 0.2 the trapezoidal rule serves, which converges geometrically. The integrand is analytic in the strip
|Im z| < pi s^2 (where 1 + u first vanishes), and at height d in it at most about exp(d^2 / (2 s^2)) times as large as
on the real line, so that step h leaves a relative error of about exp(-2 pi d / h + d^2 / (2 s^2)) for every d up to pi
s^2.

For less noise the step would have to shrink like s^2. There the mixture is one-sided except near the point z0 where
both halves weigh the same: with t = (z - z0) / s^2, 1 + u = (1-q)(1 + e^t). For |t| > 40 one of the two terms is the
other's rounding error and the integral is a Gaussian tail in closed form; Gauss-Legendre panels cover the rest at any
sigma.

References
----------
Mironov, Talwar, Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism", 2019, section 3.
Trefethen, Weideman, "The Exponentially Convergent Trapezoidal Rule", 2014, Theorem 5.1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpcore.spec import special

Array = npt.NDArray[np.float64]

_TAIL = 14.0  # standard deviations kept on each side: exp(-98) is left out
_SMALL_SIGMA = 0.2
_REACH = 40  # of t; exp(-40) is less than the rounding of 1
_LARGEST_FRACTIONAL = 32.0
_CELLS = 1 << 18  # of a table of steps by terms: 2 MiB
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(16)


@lru_cache(maxsize=8)
def binomial_terms(orders: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], Array, Array, npt.NDArray[np.int64]]:
    """Return, for one alpha after the other, k = 2..alpha, alpha - k, log binom(alpha, k), and each alpha's start."""
    k = np.concatenate([np.arange(2, alpha + 1) for alpha in orders])
    alpha = np.repeat(np.array(orders, np.int64), np.array(orders) - 1)
    table = special.gammaln(np.arange(max(orders) + 1) + 1.0)
    starts = np.concatenate([[0], np.cumsum(np.array(orders) - 1)[:-1]])
    return k, (alpha - k).astype(np.float64), table[alpha] - table[k] - table[alpha - k], starts


def log_moments_integer(q: float, sigma: float, orders: tuple[int, ...]) -> Array:
    """Return log A at integer orders of at least 2, for 0 < q < 1 and sigma > 0."""
    k, rest, log_binomial, starts = binomial_terms(orders)
    top = np.arange(2.0, max(orders) + 1.0)
    growth = top * (top - 1.0) / (2.0 * sigma * sigma)
    log_growth = growth + np.log(-np.expm1(-growth))  # log(exp(growth) - 1) without overflow
    terms = log_binomial + k * math.log(q) + rest * math.log1p(-q) + log_growth[k - 2]
    peak = np.maximum.reduceat(terms, starts)
    sums = np.add.reduceat(np.exp(terms - np.repeat(peak, np.diff(starts, append=terms.size))), starts)
    return np.asarray(np.logaddexp(0.0, peak + np.log(sums)))


def log_moments_exact(q: float, sigma: float, orders: Array) -> Array:
    """Return log A at real orders above 1 by quadrature, for 0 < q < 1 and sigma > 0.

    Relative error below 1e-12. Above order 32, where integers are dense enough, a fractional order gets an upper bound
    instead: log A is convex in alpha, so the chord between the neighboring integers lies above it.
    """
    result = np.empty_like(orders)
    high = orders > _LARGEST_FRACTIONAL
    if high.any():
        result[high] = _chord(q, sigma, orders[high])
    if not high.all():
        quadrature = _window if sigma < _SMALL_SIGMA else _trapezoid
        result[~high] = np.logaddexp(0.0, quadrature(q, sigma, orders[~high]))
    return result


def log_moments_of_many(q: Array, sigma: Array, order: float) -> Array:
    """Return log A of m steps, 0 < q < 1 and sigma > 0, at one order above 1: an integer, or at most 32.

    As `log_moments_integer` and `log_moments_exact` have it.
    """
    result = np.empty_like(q)
    whole = order == math.floor(order)
    # Steps of similar noise take similar numbers of nodes.
    ranked = np.argsort(sigma)
    narrow = ranked if whole else ranked[np.searchsorted(sigma[ranked], _SMALL_SIGMA) :]
    for i in [] if whole else ranked[: ranked.size - narrow.size]:
        result[i] = np.logaddexp(0.0, _window(float(q[i]), float(sigma[i]), np.array([order]))[0])
    rows = max(1, _CELLS // int(order)) if whole else 256
    for start in range(0, narrow.size, rows):
        chunk = narrow[start : start + rows]
        rate, noise = q[chunk, None], sigma[chunk, None]
        excess = _binomial_sum(rate, noise, int(order)) if whole else _trapezoid(rate, noise, np.array([order]))
        result[chunk] = np.logaddexp(0.0, excess)
    return result


def _binomial_sum(q: Array, sigma: Array, order: int) -> Array:
    """Return log(A - 1) of many steps, q and sigma of shape (m, 1), at one integer order: (m,)."""
    k, rest, log_binomial, _ = binomial_terms((order,))
    growth = k * (k - 1.0) / (2.0 * sigma * sigma)
    terms = log_binomial + k * np.log(q) + rest * np.log1p(-q) + growth + np.log(-np.expm1(-growth))
    return np.asarray(special.logsumexp(terms, axis=1))


def _trapezoid(q: float | Array, sigma: float | Array, orders: Array) -> Array:
    """Return log(A - 1) by the trapezoidal rule over all z that matter.

    For one step and any orders (m,), or for many steps, q and sigma of shape (m, 1), and one order (1,): (m,).
    """
    height = np.minimum(math.pi * sigma * sigma, 9.0 * sigma)
    step = np.minimum(sigma / 2.5, 2.0 * math.pi * height / (44.0 + 0.5 * (height / sigma) ** 2))  # error exp(-44)
    low, high = -_TAIL * sigma, float(orders.max()) + _TAIL * sigma
    z = low + step * np.arange(math.ceil(np.max((high - low) / step)) + 1, dtype=np.float64)
    exponent = (2.0 * z - 1.0) / (2.0 * sigma * sigma)
    u = q * np.expm1(np.minimum(exponent, 600.0))  # where it is cut, only log_ratio is used
    log_ratio = np.where(u < 0.5, np.log1p(np.minimum(u, 0.5)), np.logaddexp(np.log1p(-q), np.log(q) + exponent))
    terms = _log_density(z, sigma) + np.log(step) + _log_excess(u, log_ratio, orders[:, None])
    return np.asarray(special.logsumexp(terms, axis=1))


def _window(q: float, sigma: float, orders: Array) -> Array:
    """Return log(A - 1) from the two Gaussian tails and the window |t| <= 40 between them."""
    variance, alpha = sigma * sigma, orders[:, None]
    log_q, log_p = math.log(q), math.log1p(-q)
    middle = variance * (log_p - log_q) + 0.5
    left, right = middle - _REACH * variance, middle + _REACH * variance
    t = (np.arange(-_REACH, _REACH)[:, None] + 0.5 * (_NODES + 1.0)).ravel().astype(np.float64)
    # Weights are s^2 w / 2 in z, on panels of width 1 in t.
    log_weight = np.tile(np.log(0.5 * _NODE_WEIGHTS), 2 * _REACH) + math.log(variance)
    u = math.exp(log_p) * np.exp(t) - q
    log_ratio = np.where(u < 0.5, np.log1p(np.minimum(u, 0.5)), log_p + np.logaddexp(0.0, t))
    inner = special.logsumexp(
        _log_density(middle + variance * t, sigma) + log_weight + _log_excess(u, log_ratio, alpha), axis=1
    )
    # Left of the window u = -q. Right of it (1+u)^alpha = (q w)^alpha with w the ratio of densities, and E[w^a; z >
    # right] is exp(a (a-1) / (2 s^2)) times the mass of N(a, s^2) beyond `right`, for a = alpha, 1 and 0.
    outer_left = _log_excess(np.array(-q), np.array(log_p), orders) + special.log_ndtr(left / sigma)
    tails = np.stack(
        [
            orders * log_q + orders * (orders - 1.0) / (2.0 * variance) + special.log_ndtr((orders - right) / sigma),
            np.log(orders) + log_q + special.log_ndtr((1.0 - right) / sigma),
            np.log(np.abs(1.0 - orders * q) + 1e-300) + special.log_ndtr(-right / sigma),
        ]
    )
    signs = np.stack([np.ones_like(orders), -np.ones_like(orders), -np.sign(1.0 - orders * q)])
    outer_right, sign = special.logsumexp(tails, axis=0, b=signs, return_sign=True)
    outer_right = np.where(sign > 0.0, outer_right, -np.inf)
    return np.asarray(special.logsumexp(np.stack([inner, outer_left, outer_right]), axis=0))


def _log_density(z: Array, sigma: float | Array) -> Array:
    return np.asarray(-0.5 * (z / sigma) ** 2 - 0.5 * math.log(2.0 * math.pi) - np.log(sigma))


def _log_excess(u: Array, log_ratio: Array, alpha: Array) -> Array:
    """Return log((1+u)^alpha - 1 - alpha u), given log(1+u), without cancellation; -inf at u = 0."""
    # Small u: the binomial series from its second term on. |alpha u| <= 0.02 makes ten terms more than enough.
    small = np.minimum(np.maximum(u, -0.02 / alpha), 0.02 / alpha)
    series = np.ones_like(small)
    for j in range(10, 2, -1):
        series = 1.0 + (alpha - j + 1.0) / j * small * series
    near = 0.5 * alpha * (alpha - 1.0) * small * small * series
    middle = np.expm1(alpha * np.minimum(log_ratio, 1.0)) - alpha * np.minimum(u, math.e)
    with np.errstate(divide="ignore"):
        result = np.log(np.where(np.abs(alpha * u) <= 0.02, near, np.maximum(middle, 0.0)))
    # Large u: (1+u)^alpha taken out, with 1 + alpha u = (1 - alpha) + alpha (1 + u).
    far = np.maximum(log_ratio, 1.0)
    rest = (alpha - 1.0) * np.exp(-alpha * far) - alpha * np.exp(-(alpha - 1.0) * far)
    return np.where(log_ratio > 1.0, alpha * far + np.log1p(np.maximum(rest, -1.0 + 1e-300)), result)


def _chord(q: float, sigma: float, orders: Array) -> Array:
    """Return, at orders above 2, the line between log A at the neighboring integers."""
    below = np.floor(orders)
    left = log_moments_integer(q, sigma, tuple(int(order) for order in below))
    right = log_moments_integer(q, sigma, tuple(int(order) + 1 for order in below))
    return np.asarray(left + (orders - below) * (right - left))
