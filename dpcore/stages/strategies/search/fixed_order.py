"""The best strategy where every example takes part several times, in a fixed order, with its proof.

Examples take part at j, j + b, j + 2b, ..., a class of steps for each j < b. With X = C^T C and M = A^T A, the squared
error is ``tr(M X^{-1}) / T`` times the largest class sum of |X|. Searched are X that are 0 between different steps of
one class: then the squared sensitivity is the largest sum of a class's diagonal entries, exactly.

**Lower bound.** For a positive mu_c and a correlation matrix Z_c (positive semidefinite, ones on the diagonal) of each
class, and Y their block-diagonal matrix of mu_c Z_c: an example of class c whose changes x_i have the inner products
Z_c, which unit vectors can have, moves C times the sums by ``sqrt(tr(X_c Z_c))``. So, for every C,

    sensitivity^2 tr(M X^{-1}) sum(mu)  >=  tr(X Y) tr(M X^{-1})  >=  (sum of the singular values of A Y^(1/2))^2,

as in `dpcore.stages.strategies.search.single`, which is the case of classes of one step. Where the search is at its
end, Y is X^{-1} M X^{-1} within the classes: that is taken, its blocks scaled to correlation matrices.

**Search.** log tr(M X^{-1}) over the symmetric X with this pattern, scaled class by class to diagonal sums of 1; by
L-BFGS from the best banded Toeplitz strategy, which has the pattern.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.search.descent import descent
from dpcore.stages.strategies.search.single import ROUNDING, Bracket
from dpcore.stages.strategies.workload import Workload


def brackets(workload: Workload, period: int, start: Matrix) -> Iterator[Bracket]:
    """Yield better and better brackets; `start` is C^T C of a strategy with at most `period` bands."""
    from scipy.linalg.blas import dsyrk
    from scipy.linalg.lapack import dpotrf, dpotri

    steps = workload.steps
    full = np.asarray(workload)
    square = full.T @ full
    place = np.arange(steps)
    apart = ((place[:, None] - place) % period == 0) & ~np.eye(steps, dtype=bool)

    def scale_of(x: Matrix) -> Matrix:
        return np.sqrt(_class_sums(np.diagonal(x), period))[place % period]

    def objective(x: Matrix) -> tuple[float, Matrix]:
        if not (_class_sums(np.diagonal(x), period) > 0).all():
            return np.inf, x
        scale = scale_of(x)
        # SciPy's library alone: the threads of NumPy's would spin against those of this.
        lower, failed = dpotrf(x, lower=1)
        if failed:  # not positive definite
            return np.inf, x
        inverse = _mirrored(dpotri(lower, lower=1)[0])
        decoder = workload.apply(scale[:, None] * inverse)  # of X scaled to class sums of 1, up to columns
        slope = -_mirrored(dsyrk(1.0, decoder, trans=1, lower=1))
        product = scale * (square * inverse @ scale)  # the diagonal of M X^{-1}
        error = float(product.sum())
        slope[place, place] += _class_sums(product, period)[place % period] / scale**2
        slope[apart] = 0.0
        return float(np.log(error)), slope / error

    def scaled(x: Matrix) -> Matrix:
        return x / np.multiply.outer(scale_of(x), scale_of(x))

    count = 0
    for x, _ in descent(objective, scaled(start)):
        last = x
        count += 1
        if count % _CHECKED == 0:
            yield bracket(workload, scaled(x), square, period)
    yield bracket(workload, scaled(last if count else start), square, period)


_CHECKED = 20


def bracket(workload: Workload, x: Matrix, square: Matrix, period: int) -> Bracket:
    """Return the error of X, whose class sums are 1, and a bound, lower where rounding hides a part of it."""
    steps = workload.steps
    inverse = np.linalg.inv(x)
    dual, half = inverse @ square @ inverse, np.zeros((steps, steps))
    total = 0.0
    for c in range(min(period, steps)):
        members = np.arange(c, steps, period)
        block = dual[np.ix_(members, members)]
        scale, weight = np.diagonal(block) ** -0.5, float(np.diagonal(block).mean())
        correlation = scale[:, None] * block * scale
        with suppress(np.linalg.LinAlgError):
            half[np.ix_(members, members)] = np.sqrt(weight) * np.linalg.cholesky(correlation)
        total += weight
    singular = np.linalg.svd(workload.apply(half), compute_uv=False)
    bound = max(float((singular - ROUNDING * singular[0]).sum()), 0.0) ** 2 / total / steps
    return Bracket(np.asarray(np.linalg.cholesky(x), dtype=np.float64), float((square * inverse).sum()) / steps, bound)


def _mirrored(lower: Matrix) -> Matrix:
    """Return the symmetric matrix with this lower triangle; zeros are above."""
    result = lower + lower.T
    np.fill_diagonal(result, np.diagonal(lower))
    return result


def _class_sums(diagonal: Matrix, period: int) -> Matrix:
    classes = np.arange(len(diagonal)) % period
    return np.asarray(np.bincount(classes, diagonal, minlength=min(period, len(diagonal))), dtype=np.float64)
