"""The weights of the best bound where A^{-1} has two bands, as that of prefix sums: without eigenvectors.

The iteration of `dpcore.stages.strategies.search.single` needs the diagonal of ``S = T^(-1/2)`` for a tridiagonal
T = Lambda^(-1/2) A^{-1} A^{-T} Lambda^(-1/2). S is nearly a sum of few ``w_i (T + s_i)^{-1}``, and the diagonal of each
of these follows from the pivots of its factorizations from the top, f, and from the end, g: it is 1 / (f + g - T_tt).
That takes the time of T steps, and no proof rests on it: whatever lambda is found, its bound is computed from singular
values.

References
----------
Hale, Higham and Trefethen, "Computing A^alpha, log(A), and related matrix functions by contour integrals", 2008,
method 3.
"""

from __future__ import annotations

import numpy as np

from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.search.fixed_point import Accelerated

_POLES, _MOST = 24, 200


def logarithms(inverse: Matrix, tolerance: float) -> Matrix:
    """Return log lambda whose bound is within `tolerance` of the largest, from the two bands of A^{-1}, (2, T)."""
    diagonal, off = inverse[0] ** 2, (inverse[0] * inverse[1])[:-1]
    diagonal[1:] += inverse[1, :-1] ** 2
    search, here, best, reached = Accelerated(), np.zeros(len(diagonal)), np.zeros(len(diagonal)), np.inf
    for _ in range(_MOST):
        scale = np.exp((here.max() - here) / 2)
        found = _root_diagonal(diagonal * scale**2, off * scale[:-1] * scale[1:]) * scale**2
        if not np.isfinite(found).all() or not (found > 0).all():
            break
        mean = float(np.average(found, weights=scale**-2))
        # Divided by its largest diagonal entry, X is a strategy's: error over bound is largest over mean entry.
        if found.max() / mean < reached:
            best, reached = here, found.max() / mean
        if np.sqrt(reached) - 1 <= tolerance:
            break
        here = search.following(here, 2 * np.log(found / mean))
    return best


def _root_diagonal(diagonal: Matrix, off: Matrix) -> Matrix:
    """Return the diagonal of T^(-1/2)."""
    from scipy.special import ellipj, ellipkm1

    beside = np.abs(np.append(off, 0.0)) + np.abs(np.append(0.0, off))
    least, most = 1 / _inverse_diagonal(diagonal, off).sum(), float((diagonal + beside).max())
    period = ellipkm1(least / most)
    sn, cn, dn, _ = ellipj((np.arange(_POLES) + 0.5) * period / _POLES, 1 - least / most)
    weights = 2 * period * np.sqrt(least) / (np.pi * _POLES) * dn / cn**2
    shifts = least * (sn / cn) ** 2
    total = np.zeros(len(diagonal))
    for weight, shift in zip(weights, shifts, strict=True):
        total += weight * _inverse_diagonal(diagonal + shift, off)
    return total


def _inverse_diagonal(diagonal: Matrix, off: Matrix) -> Matrix:
    from scipy.linalg.lapack import dpttrf

    down, _, _ = dpttrf(diagonal, off)
    up, _, _ = dpttrf(diagonal[::-1], off[::-1])
    return 1 / np.asarray(down + up[::-1] - diagonal)
