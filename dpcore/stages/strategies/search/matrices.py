"""The best of all strategies if every example takes part once, with its proof.

With X = C^T C, row t of A C^{-1} has the squared norm ``(A X^{-1} A^T)_tt``, and column s of C the squared norm X_ss.
The squared error is ``tr(A X^{-1} A^T) / T`` times the largest X_ss.

**Lower bound.** For all lambda > 0, and any lower-triangular or other C with all X_ss <= 1:

    tr(A X^{-1} A^T) sum(lambda)  >=  tr(A X^{-1} A^T) tr(Lambda X)
                                  >=  tr((Lambda^(1/2) A^T A Lambda^(1/2))^(1/2))^2,

the second by Cauchy-Schwarz, in nuclear and Frobenius norms,
``|A Lambda^(1/2)|_* = |(A C^{-1}) (C Lambda^(1/2))|_* <= |A C^{-1}|_F |C Lambda^(1/2)|_F``. So
``(sum of the singular values of A Lambda^(1/2))^2 / (T sum(lambda))`` is below any mechanism's squared error. Equality
holds for ``X = Lambda^(-1/2) (Lambda^(1/2) A^T A Lambda^(1/2))^(1/2) Lambda^(-1/2)`` where all X_ss are 1.

**Search.** The logarithm of the bound over log lambda, whose derivative is the difference of the shares that each s has
in ``lambda_s X_ss`` and in lambda. It is 0 where bound and strategy meet. With singular values p S q^T of
A Lambda^(1/2), X is that of q S q^T. S^(-2) and q are the eigenvalues and vectors of
``Lambda^(-1/2) A^{-1} A^{-T} Lambda^(-1/2)``, which is tridiagonal where A^{-1} has two bands.

**Start.** Where A^{-1} has two bands, as that of prefix sums, the search begins near its end, and without eigenvectors:
lambda is multiplied by the square of X's diagonal again and again. That needs the diagonal of ``S = T^(-1/2)`` for a
tridiagonal T = Lambda^(-1/2) A^{-1} A^{-T} Lambda^(-1/2). S is nearly a sum of few ``w_i (T + s_i)^{-1}``, and the
diagonal of each of these follows from the pivots of its factorizations from the top, f, and from the end, g: it is
1 / (f + g - T_tt). That takes the time of T steps, and no proof rests on it: whatever lambda is found, its bound is
computed from singular values.

References
----------
Hale, Higham and Trefethen, "Computing A^alpha, log(A), and related matrix functions by contour integrals", 2008,
method 3.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.workloads import Workload

# Descent by L-BFGS on an open domain, such as that of positive definite matrices: SciPy's fails at its edge.


_DECREASE, _SHORTEST_MOVE, _MEMORY = 1e-4, 1e-12, 20


def descent(objective: Callable[[Matrix], tuple[float, Matrix]], start: Matrix) -> Iterator[tuple[Matrix, float]]:
    """Yield points of falling value, until no step along the direction lowers it.

    `objective` returns value and gradient, an infinite value outside of the domain.

    References
    ----------
    Nocedal and Wright, "Numerical Optimization", algorithm 7.4.
    """
    point = start
    value, slope = objective(point)
    moves: list[Matrix] = []
    turns: list[Matrix] = []
    products: list[float] = []
    while True:
        direction = -_times_inverse_hessian(slope, moves, turns, products)
        fall = _inner(direction, slope)
        if fall >= 0:
            direction, fall = -slope, -_inner(slope, slope)
            moves, turns, products = [], [], []
        length = 1.0 if moves else min(1.0, 0.1 * np.abs(point).max() / max(np.abs(slope).max(), 1e-300))
        while True:
            new = point + length * direction
            new_value, new_slope = objective(new)
            if new_value <= value + _DECREASE * length * fall:
                break
            length /= 2
            if length < _SHORTEST_MOVE:
                return
        move, turn = new - point, new_slope - slope
        product = _inner(move, turn)
        if product > 0:
            products = [*products, product][-_MEMORY:]
            moves, turns = [*moves, move][-_MEMORY:], [*turns, turn][-_MEMORY:]
        point, value, slope = new, new_value, new_slope
        yield point, value


def _times_inverse_hessian(slope: Matrix, moves: list[Matrix], turns: list[Matrix], products: list[float]) -> Matrix:
    """Return the two-loop recursion's result; `products` are those of moves and turns."""
    from scipy.linalg.blas import daxpy

    result, weights = slope.flatten(), []
    for move, turn, product in zip(reversed(moves), reversed(turns), reversed(products), strict=True):
        weights.append(_inner(move, result) / product)
        daxpy(turn.ravel(), result, a=-weights[-1])  # in place
    if moves:
        result *= products[-1] / _inner(turns[-1], turns[-1])
    for move, turn, product, weight in zip(moves, turns, products, reversed(weights), strict=True):
        daxpy(move.ravel(), result, a=weight - _inner(turn, result) / product)
    return result.reshape(slope.shape)


def _inner(left: Matrix, right: Matrix) -> float:
    from scipy.linalg.blas import ddot

    return float(ddot(left.ravel(), right.ravel()))


MOST_ITERATIONS = 500

ROUNDING = 32 * 2.0**-53
"""Of the largest eigenvalue: the backward error of a symmetric eigenproblem."""

_NEAR = 1e-7

_POLES, _MOST = 24, 500


@dataclass(frozen=True)
class Bracket:
    """A strategy and a bound: R with ``R R^T = C^T C``, (T, T), its squared error, and the least of any mechanism."""

    root: Matrix
    squared_error: float
    lower_bound: float

    @property
    def square(self) -> Matrix:
        """C^T C."""
        result: Matrix = self.root @ self.root.T
        return result

    @property
    def gap(self) -> float:
        """How far the error may be above the least one, as a share of it."""
        return float(np.sqrt(self.squared_error / self.lower_bound)) - 1 if self.lower_bound > 0 else np.inf


def brackets(workload: Workload) -> Iterator[Bracket]:
    """Yield better and better brackets of the least mean error."""
    steps = workload.steps
    here = logarithms(workload.inverse, _NEAR) if len(workload.inverse) == 2 else np.ones(steps)
    bound, best, kept = 0.0, np.inf, np.eye(steps)
    last: list[tuple[Matrix, Matrix, float]] = []

    def objective(exponents: Matrix) -> tuple[float, Matrix]:
        columns = _weights(exponents)  # lambda
        if not columns.all():
            return np.inf, exponents
        singular, vectors, total = _singular(workload, columns)
        last[:] = [(singular, vectors, total)]
        shares = vectors**2 @ singular  # lambda times the diagonal of X
        return -2 * float(np.log(shares.sum())), columns / steps - shares / shares.sum()

    objective(here)
    for _ in chain([None], islice(descent(objective, here), MOST_ITERATIONS)):
        ((singular, vectors, total),) = last
        bound = max(bound, total**2 / steps**2)
        # C scaled column by column to norm 1: a strategy whatever lambda is.
        norms = np.sqrt(vectors**2 @ singular)
        error = float(np.square(workload.apply(norms[:, None] * vectors * singular**-0.5)).sum()) / steps
        if error < best:
            best, kept = error, vectors * np.sqrt(singular) / norms[:, None]
        yield Bracket(kept, best, bound)


def quick_bound(workload: Workload, tolerance: float) -> float | None:
    """Return a lower bound of all mechanisms' mean squared errors if eigenvalues alone give it; else None."""
    if len(workload.inverse) != 2:
        return None
    columns = _weights(logarithms(workload.inverse, tolerance))
    return float(_accurate(*_tridiagonal(workload, columns))[1] / workload.steps) ** 2


def _accurate(diagonal: Matrix, off: Matrix) -> tuple[Matrix, float]:
    """Return the eigenvalues, ascending, and a lower bound on the sum of their inverse roots.

    From its Cholesky factor each eigenvalue is known up to rounding relative to itself, over the least eigenvalue of
    the matrix scaled to a diagonal of ones (Demmel and Veselic, "Jacobi's method is more accurate than QR", 1992).
    """
    from scipy.linalg import eigvalsh_tridiagonal
    from scipy.linalg.lapack import dpteqr

    if not len(off):
        return diagonal, float(diagonal[0] ** -0.5) * (1 - ROUNDING)
    scaled = off / np.sqrt(diagonal[:-1] * diagonal[1:])
    least = eigvalsh_tridiagonal(np.ones(len(diagonal)), scaled, select="i", select_range=(0, 0))[0] - ROUNDING
    squares, _, _, failed = dpteqr(diagonal, off, np.zeros((1, 1)), compute_z=0)
    if failed or least <= ROUNDING:
        return eigvalsh_tridiagonal(diagonal, off), 0.0
    return squares[::-1], float((squares**-0.5).sum()) * (1 + ROUNDING / least) ** -0.5


def _weights(exponents: Matrix) -> Matrix:
    values = np.exp(exponents - exponents.max())
    result: Matrix = values / values.mean()
    return result


def factor(square: Matrix) -> Matrix:
    """Return the lower-triangular C with ``C^T C = square``: a Cholesky factorization from the end."""
    flipped = np.linalg.cholesky(square[::-1, ::-1])
    return np.ascontiguousarray(flipped.T[::-1, ::-1])


def _singular(workload: Workload, columns: Matrix) -> tuple[Matrix, Matrix, float]:
    """Return singular values and right vectors of A Lambda^(1/2), and a lower bound on the sum of the values.

    Rounding, a small multiple of the unit roundoff and the largest eigenvalue, must not raise the bound.
    """
    from scipy.linalg import eigh, eigh_tridiagonal

    if len(workload.inverse) <= 2:
        diagonal, off = _tridiagonal(workload, columns)
        vectors = eigh_tridiagonal(diagonal, off)[1]
        squares, proved = _accurate(diagonal, off)
        return np.maximum(squares, ROUNDING**2 * squares[-1]) ** -0.5, vectors, proved
    # The inverse of the banded matrix, whose small eigenvalues would be lost next to its large ones.
    half = np.asarray(workload) * np.sqrt(columns)
    squares, vectors = eigh(half.T @ half, driver="evd", overwrite_a=True, check_finite=False)
    margin = ROUNDING * squares[-1]
    known = float(np.sqrt(np.maximum(squares - margin, 0)).sum())
    return np.sqrt(np.maximum(squares, margin)), vectors, known


def _tridiagonal(workload: Workload, columns: Matrix) -> tuple[Matrix, Matrix]:
    """Return the diagonals of ``Lambda^(-1/2) A^{-1} A^{-T} Lambda^(-1/2)``."""
    weights = columns**-0.5
    diagonal, off = _products(workload.inverse)
    return diagonal * weights**2, off * weights[:-1] * weights[1:]


def _products(inverse: Matrix) -> tuple[Matrix, Matrix]:
    """Return the diagonals of ``A^{-1} A^{-T}``, from the one or two bands of A^{-1}."""
    diagonal = inverse[0] ** 2
    if len(inverse) == 1:
        return diagonal, np.zeros(len(diagonal) - 1)
    diagonal[1:] += inverse[1, :-1] ** 2
    return diagonal, (inverse[0] * inverse[1])[:-1]


def logarithms(inverse: Matrix, tolerance: float) -> Matrix:
    """Return log lambda whose bound is within `tolerance` of the largest, from the two bands of A^{-1}, (2, T)."""
    diagonal, off = _products(inverse)
    here, best, reached = np.zeros(len(diagonal)), np.zeros(len(diagonal)), np.inf
    for _ in range(_MOST):
        scale = np.exp((here.max() - here) / 2)
        ratios = _root_diagonal(diagonal * scale**2, off * scale[:-1] * scale[1:]) * scale**2
        if not np.isfinite(ratios).all() or not (ratios > 0).all():
            break
        mean = float(np.average(ratios, weights=scale**-2))
        # Divided by its largest diagonal entry, X is a strategy's: error over bound is largest over mean entry.
        if ratios.max() / mean < reached:
            best, reached = here, ratios.max() / mean
        if np.sqrt(reached) - 1 <= tolerance:
            break
        here = here + 2 * np.log(ratios / mean)
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


# The best strategy if every example takes part several times, in a fixed order, with its proof.
#
# Examples take part at j, j + b, j + 2b, ..., a class of steps for each j < b. With X = C^T C and M = A^T A, the
# squared error is ``tr(M X^{-1}) / T`` times the largest class sum of |X|. Searched are X that are 0 between different
# steps of one class: then the squared sensitivity is the largest sum of a class's diagonal entries, exactly.
#
# **Lower bound.** For a positive mu_c and a correlation matrix Z_c (positive semidefinite, ones on the diagonal) of
# each class, and Y their block-diagonal matrix of mu_c Z_c: an example of class c whose changes x_i have the inner
# products Z_c, which unit vectors can have, moves C times the sums by ``sqrt(tr(X_c Z_c))``. So, for every C,
#
#     sensitivity^2 tr(M X^{-1}) sum(mu)  >=  tr(X Y) tr(M X^{-1})  >=  (sum of the singular values of A Y^(1/2))^2,
#
# as above, which is the case of classes of one step. At the end of the search Y is X^{-1} M X^{-1} within the
# classes: that is taken, its blocks scaled to correlation matrices.
#
# **Search.** log tr(M X^{-1}) over the symmetric X with this pattern, scaled class by class to diagonal sums of 1; by
# L-BFGS from the best banded Toeplitz strategy, which has the pattern.


def brackets_of_epochs(workload: Workload, period: int, start: Matrix) -> Iterator[Bracket]:
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
        # Only SciPy's library: the threads of NumPy's would spin against those of this.
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
            yield bracket_of_epochs(workload, scaled(x), square, period)
    yield bracket_of_epochs(workload, scaled(last if count else start), square, period)


_CHECKED = 20


def bracket_of_epochs(workload: Workload, x: Matrix, square: Matrix, period: int) -> Bracket:
    """Return the error of X, whose class sums are 1, and a bound, which is lower if rounding hides a part of it."""
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
