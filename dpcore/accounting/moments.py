"""Moments of the Poisson-subsampled Gaussian.

With noise multiplier s and sample rate q let P = (1-q) N(0, s^2) + q N(1, s^2) and Q = N(0, s^2). Removing one example
turns P into Q (one dimension is enough: both are the same in all directions orthogonal to the example's clipped
vector, and a shorter vector only helps). The Renyi divergence of order alpha is log A(alpha) / (alpha - 1) with

    A(alpha) = E_{z ~ Q}[(1 + u(z))^alpha],   u(z) = q (exp((2z - 1) / (2 s^2)) - 1),   E[u] = 0.

Mironov, Talwar and Zhang (2019, section 3.1) show that D(P||Q) >= D(Q||P), so A covers both directions of add-remove.
Everything here works with A - 1, whose parts are all positive, so that tiny divergences keep their digits:

- integer alpha: A - 1 = sum_{k=2..alpha} binom(alpha, k) q^k (1-q)^(alpha-k) (exp((k^2 - k)/(2 s^2)) - 1);
- any alpha: A - 1 = E[(1+u)^alpha - 1 - alpha u], by the trapezoidal rule.

The rule converges geometrically. The integrand is analytic in the strip |Im z| < pi s^2 (where 1 + u first vanishes),
and at height d in it at most about exp(d^2 / (2 s^2)) times as large as on the real line, so that step h leaves a
relative error of about exp(-2 pi d / h + d^2 / (2 s^2)) for every d up to pi s^2.

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
from scipy.special import gammaln, logsumexp

Array = npt.NDArray[np.float64]

_TAIL = 14.0  # standard deviations kept on each side: exp(-98) is left out
_MOST_POINTS = 1 << 17  # of the trapezoidal rule; reached at noise multipliers around 0.02
_BLOCK = 1 << 19  # points times orders in memory at once


@lru_cache(maxsize=8)
def _pairs(orders: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], Array, Array, npt.NDArray[np.int64]]:
    """Return, for one alpha after the other, k = 2..alpha, alpha - k, log binom(alpha, k), and each alpha's start."""
    k = np.concatenate([np.arange(2, alpha + 1) for alpha in orders])
    alpha = np.repeat(np.array(orders, np.int64), np.array(orders) - 1)
    table = gammaln(np.arange(max(orders) + 1) + 1.0)
    starts = np.concatenate([[0], np.cumsum(np.array(orders) - 1)[:-1]])
    return k, (alpha - k).astype(np.float64), table[alpha] - table[k] - table[alpha - k], starts


def log_moments_integer(q: float, sigma: float, orders: tuple[int, ...]) -> Array:
    """Return log A at integer orders of at least 2, for 0 < q < 1 and sigma > 0."""
    k, rest, log_binomial, starts = _pairs(orders)
    top = np.arange(2.0, max(orders) + 1.0)
    growth = top * (top - 1.0) / (2.0 * sigma * sigma)
    log_growth = growth + np.log(-np.expm1(-growth))  # log(exp(growth) - 1) without overflow
    terms = log_binomial + k * math.log(q) + rest * math.log1p(-q) + log_growth[k - 2]
    peak = np.maximum.reduceat(terms, starts)
    sums = np.add.reduceat(np.exp(terms - np.repeat(peak, np.diff(starts, append=terms.size))), starts)
    return np.asarray(np.logaddexp(0.0, peak + np.log(sums)))


def log_moments_exact(q: float, sigma: float, orders: Array) -> Array:
    """Return log A at real orders above 1 by quadrature, for 0 < q < 1 and sigma > 0.

    Below a noise multiplier of about 0.02 (epsilon in the thousands per step) the quadrature would be slow, and the
    smaller of two upper bounds takes its place: log A is convex in alpha, so the chord between the neighboring
    integers lies above it; and (1+u)^alpha is convex in q, so A <= 1 - q + q exp(alpha (alpha-1) / (2 s^2)).
    """
    height = min(math.pi * sigma * sigma, 9.0 * sigma)
    step = min(sigma / 2.5, 2.0 * math.pi * height / (44.0 + 0.5 * (height / sigma) ** 2))  # error exp(-44)
    low, high = -_TAIL * sigma, float(orders.max()) + _TAIL * sigma
    if (high - low) / step > _MOST_POINTS:
        return _log_moments_bound(q, sigma, orders)
    z = low + step * np.arange(math.ceil((high - low) / step) + 1)
    exponent = (2.0 * z - 1.0) / (2.0 * sigma * sigma)
    log_weight = -z * z / (2.0 * sigma * sigma) + math.log(step) - 0.5 * math.log(2.0 * math.pi) - math.log(sigma)
    u = q * np.expm1(np.minimum(exponent, 600.0))  # where it is cut, only log_ratio is used
    log_ratio = np.where(u < 0.5, np.log1p(np.minimum(u, 0.5)), np.logaddexp(math.log1p(-q), math.log(q) + exponent))
    per_block = max(1, _BLOCK // z.size)
    blocks = [
        logsumexp(log_weight + _log_excess(u, log_ratio, orders[first : first + per_block, None]), axis=1)
        for first in range(0, orders.size, per_block)
    ]
    return np.asarray(np.logaddexp(0.0, np.concatenate(blocks)))


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


def _log_moments_bound(q: float, sigma: float, orders: Array) -> Array:
    below = np.floor(orders)
    needed = np.unique(np.concatenate([below, below + 1.0]))
    whole = tuple(int(order) for order in needed if order >= 2.0)
    known = dict(zip(whole, log_moments_integer(q, sigma, whole), strict=True)) | {1: 0.0}
    left = np.array([known[int(order)] for order in below])
    right = np.array([known[int(order) + 1] for order in below])
    chord = left + (orders - below) * (right - left)
    mixture = np.logaddexp(math.log1p(-q), math.log(q) + orders * (orders - 1.0) / (2.0 * sigma * sigma))
    return np.asarray(np.minimum(chord, mixture))
