"""The series of Mironov, Talwar and Zhang at fractional orders, as an upper bound that others also compute.

Splitting A(alpha) (see moments.py) at z0 = s^2 log(1/q - 1) + 1/2, where both parts of the mixture weigh the same, and
expanding each side by the binomial series gives, with j = alpha - i,

    A = sum_i binom(alpha, i) [ q^i (1-q)^j exp((i^2 - i)/(2 s^2)) Phi((z0 - i)/s)
                              + q^j (1-q)^i exp((j^2 - j)/(2 s^2)) Phi((j - z0)/s) ].

Beyond i = alpha + 1 the signs of binom(alpha, i) alternate. dp-accounting 0.6 adds absolute values: still
a valid upper bound, but a loose one at orders below about 2 and sample rates above about 0.1. The same rule is
followed here, down to where the sum stops, so that both give the same figures at the same orders; `log_moments_exact`
gives the sum itself. The terms fall only like i^-(alpha + 2): where a thousand of them do not suffice, the order is
left out (infinity).

References
----------
Mironov, Talwar, Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism", 2019, section 3.3.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dpcore.spec import special

Array = npt.NDArray[np.float64]

_STAGES = (64, 256, 1000)  # terms tried; most orders need fewer than 64
_NEGLIGIBLE = 30.0  # a term below exp(-30) of the sum ends it


def log_moments_series(q: float, sigma: float, orders: Array) -> Array:
    """Return upper bounds on log A at fractional orders above 1, for 0 < q < 1 and sigma > 0; inf where it fails."""
    result = np.full(orders.shape, np.inf)
    open_ = np.arange(orders.size)
    for terms in _STAGES:
        value, done = _partial(q, sigma, orders[open_], terms)
        result[open_[done]] = value[done]
        open_ = open_[~done]
        if open_.size == 0:
            break
    return result


def _partial(q: float, sigma: float, orders: Array, terms: int) -> tuple[Array, npt.NDArray[np.bool_]]:
    i = np.arange(terms, dtype=np.float64)
    alpha = orders[:, None]
    j = alpha - i
    variance = 2.0 * sigma * sigma
    split = sigma * sigma * math.log(1.0 / q - 1.0) + 0.5
    log_q, log_p = math.log(q), math.log1p(-q)
    # Of the absolute value.
    log_binomial = special.gammaln(alpha + 1.0) - special.gammaln(i + 1.0) - special.gammaln(j + 1.0)
    left = log_binomial + i * log_q + j * log_p + (i * i - i) / variance + special.log_ndtr((split - i) / sigma)
    right = log_binomial + j * log_q + i * log_p + (j * j - j) / variance + special.log_ndtr((j - split) / sigma)
    total = np.logaddexp.accumulate(np.logaddexp(left, right), axis=1)
    falling = (left[:, 1:] < left[:, :-1]) & (right[:, 1:] < right[:, :-1])
    ends = falling & (np.maximum(left, right)[:, 1:] < total[:, 1:] - _NEGLIGIBLE)
    stop = np.argmax(ends, axis=1)
    return np.asarray(total[np.arange(orders.size), stop + 1]), np.asarray(ends.any(axis=1))
