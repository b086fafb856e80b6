"""Workloads, the matrices A whose error a strategy is chosen for, and the error of a strategy on one.

A maps the released averages g_0 .. g_{T-1} to the wanted vectors: for SGD the iterates, x_{t+1} - x_0 = -eta (A g)_t.
Their noise is A C^{-1} Z.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError
from dpcore.spec import validate
from dpcore.stages.strategies import base
from dpcore.stages.strategies.base import Matrix, Strategy
from dpcore.stages.strategies.kinds import BandedToeplitz, Identity, Toeplitz, summed
from dpcore.stages.strategies.sensitivity import sensitivity

# The workload of a strategy: a lower-triangular matrix A whose inverse has few bands.
#
# A maps the released averages g_0 .. g_{T-1} to the wanted vectors. These follow from a recurrence (an iterate
# from the one before, a momentum from the one before, ...), and A^{-1} is that recurrence: it has two bands, and a
# product of k of them has k + 1. So A is applied in time T, and (A^T A)^{-1} = A^{-1} A^{-T} is banded, which makes the
# least error of any mechanism cheap to find (`dpcore.stages.strategies.search`).


@dataclass(frozen=True, eq=False)
class Workload:
    """A lower-triangular matrix A, given by its inverse.

    Parameters
    ----------
    inverse : (b, T) array
        The columns of A^{-1} from the diagonal down: ``inverse[k, t] = A^{-1}[t + k, t]``, 0 if t + k >= T. The
        diagonal is positive.
    name : str
        For tables and pictures.

    Notes
    -----
    NumPy takes it for the (T, T) array of A; ``first @ second`` is the product of two, or A times an array.
    """

    inverse: Matrix = field(repr=False)
    name: str = "workload"

    def __post_init__(self) -> None:
        inverse = base.finite_array(2, inverse=self.inverse)
        count, steps = inverse.shape
        if count > steps:
            raise ArgumentError(f"inverse.shape={inverse.shape}: must be (b, T) with at most T = {steps} bands")
        base.check_diagonal(inverse[0], "inverse")
        inverse[np.add.outer(np.arange(count), np.arange(steps)) >= steps] = 0.0
        inverse.flags.writeable = False
        object.__setattr__(self, "inverse", inverse)

    @property
    def steps(self) -> int:
        """T."""
        return int(self.inverse.shape[1])

    def apply(self, vectors: Matrix) -> Matrix:
        """Return A times a (T,) or (T, m) array: the recurrence, run forward."""
        from scipy.linalg.lapack import dtbtrs

        result, _ = dtbtrs(self.inverse, vectors, uplo="L")
        applied: Matrix = np.asarray(result)
        return applied.reshape(np.shape(vectors))

    def series(self) -> Matrix | None:
        """Return the first column of A^{-1}, (b,), if A is Toeplitz, else None."""
        first = self.inverse[:, 0]
        rows = np.add.outer(np.arange(len(self.inverse)), np.arange(self.steps))
        same = np.where(rows < self.steps, self.inverse == first[:, None], True).all()
        return first if same else None

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return A, (T, T)."""
        return self.apply(np.eye(self.steps)).astype(dtype or np.float64, copy=False)

    def __matmul__(self, other: Any) -> Any:
        """Return the workload of A times another, or A times an array."""
        if not isinstance(other, Workload):
            return self.apply(np.asarray(other, dtype=np.float64))
        if other.steps != self.steps:
            raise ArgumentError(f"steps={other.steps}: must be {self.steps}, as of the other workload")
        # (A B)^{-1} = B^{-1} A^{-1}: column t of A^{-1} combines columns t, t + 1, ... of B^{-1}.
        count = min(len(self.inverse) + len(other.inverse) - 1, self.steps)
        product = np.zeros((count, self.steps))
        for k, band in enumerate(self.inverse):
            for j, column in enumerate(other.inverse):
                if k + j < count:
                    product[k + j, : self.steps - k] += column[k:] * band[: self.steps - k]
        return Workload(product, f"{self.name} of {other.name}")

    def describe(self) -> dict[str, Any]:
        """Return name, size and the digest of the bands as JSON values."""
        return {"name": self.name, "steps": self.steps, "sha256": base.digest(self.inverse)}


def recurrence(factors: npt.ArrayLike, weights: npt.ArrayLike, name: str) -> Workload:
    """Return the workload of ``y_t = factors_t y_{t-1} + weights_t x_t``; (T,) each, weights positive."""
    factors, weights = np.asarray(factors, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    steps = len(weights)
    bands = np.zeros((min(2, steps), steps))
    bands[0] = 1 / weights
    if steps > 1:
        bands[1, :-1] = -factors[1:] / weights[1:]
    return Workload(bands, name)


def ones(steps: int) -> Workload:
    """Return the workload of plain SGD, prefix sums: ones on and below the diagonal."""
    steps = _steps(steps)
    return recurrence(np.ones(steps), np.ones(steps), "prefix sums")


def momentum(steps: int, momentum: float) -> Workload:
    """Return the workload of SGD with momentum m_t = `momentum` m_{t-1} + g_t: prefix sums of m."""
    factor = validate.decay(momentum=momentum)
    return _named(ones(steps) @ accumulation(steps, factor), f"momentum {factor:g}")


def weight_decay(steps: int, decay: float) -> Workload:
    """Return the workload of SGD that shrinks the parameters by ``1 - decay`` before each step; `decay` in [0, 1]."""
    kept = 1 - validate.unit_interval(decay=decay)
    return _named(accumulation(steps, kept), f"weight decay {decay:g}")


def learning_rates(rates: npt.ArrayLike) -> Workload:
    """Return the workload of SGD whose steps have these learning rates, (T,) positive numbers."""
    given = base.finite_array(1, rates=rates)
    if not (given > 0).all():
        raise ArgumentError(f"rates: must be positive, and the one of step {int(np.argmin(given > 0))} is not")
    return recurrence(np.ones(len(given)), given, "learning rates")


def exponential_average(steps: int, decay: float) -> Workload:
    """Return the workload of the average of SGD's iterates, ``y_t = decay y_{t-1} + (1 - decay) x_t``."""
    factor, steps = validate.decay(decay=decay), _steps(steps)
    average = recurrence(np.full(steps, factor), np.full(steps, 1 - factor), "average")
    return _named(average @ ones(steps), f"average with decay {factor:g}")


def srg(steps: int, decay: float | npt.ArrayLike, momentum: float = 0.0) -> Workload:
    """Return the "true" workload of stochastic recursive gradients.

    The releases are differences Delta_t; G_t = c_t G_{t-1} + Delta_t is the gradient that SGD with momentum takes.

    `decay` is c, or (T,) numbers c_t with c_0 unused; `momentum` is the update's. DP-SRG, section 5: M A L, with A the
    prefix sums, M the momentum and L the accumulation.
    """
    factor = validate.decay(momentum=momentum)
    sums = ones(steps) @ accumulation(steps, decay)
    return _named(sums if factor == 0 else accumulation(steps, factor) @ sums, "recursive gradients")


def accumulation(steps: int, decay: float | npt.ArrayLike) -> Workload:
    """Return L of G_t = c_t G_{t-1} + Delta_t: L[t, s] = c_{s+1} ... c_t; `decay` a float or (T,)."""
    steps = _steps(steps)
    factors = np.asarray(decay, dtype=np.float64)
    if factors.ndim == 0:
        factors = np.full(steps, float(factors))
    if factors.shape != (steps,) or not np.isfinite(factors).all():
        raise ArgumentError(f"decay: must be a finite number or {steps} of them, one for each step")
    return recurrence(factors, np.ones(steps), "accumulation")


def _steps(steps: int) -> int:
    return validate.integer(steps=steps, minimum=1)


def _named(workload: Workload, name: str) -> Workload:
    return replace(workload, name=name)


def row_norms(strategy: Strategy, workload: npt.ArrayLike, steps: int) -> Matrix:
    """Return the norm of each row of A C^{-1}, (steps,): the noise of each wanted vector over that of Z."""
    from scipy.linalg import solve_triangular

    steps = base.check_block(validate.integer(steps=steps, minimum=1), strategy.steps)
    wanted = base.finite_array(2, workload=workload)
    if wanted.shape != (steps, steps):
        raise ArgumentError(f"workload.shape={wanted.shape}: must be {(steps, steps)}, one row for each step")
    # B C = A, transposed: C^T B^T = A^T.
    decoder = solve_triangular(strategy.matrix(steps), wanted.T, lower=True, trans="T")
    return np.asarray(np.linalg.norm(decoder, axis=0))


def rmse(strategy: Strategy, workload: npt.ArrayLike, steps: int, patterns: Iterable[npt.ArrayLike]) -> float:
    """Return the root mean squared error per step and coordinate at mu = 1, in clip norms.

    Parameters
    ----------
    strategy : Strategy
        C.
    workload : (steps, steps) array
        A.
    steps : int
        Steps of the run.
    patterns : iterable of (k,) integer arrays
        When examples take part, see `sensitivity`.

    Notes
    -----
    ``sqrt(mean of the squared row norms of A C^{-1}) * sensitivity``, which is the noise multiplier at mu = 1.
    """
    squares = np.square(row_norms(strategy, workload, steps))
    return math.sqrt(float(squares.mean())) * sensitivity(strategy, patterns, steps)


def error_of(strategy: Strategy, workload: Workload, epochs: int = 1) -> float:
    """Return the root mean squared error at mu = 1; see `rmse`.

    If both are Toeplitz, it is fast for millions of steps, too.
    """
    steps = workload.steps
    period = -(-steps // epochs)
    strategy = getattr(strategy, "strategy", strategy)  # of one `in_blocks` the matrix alone counts
    if isinstance(strategy, Identity):
        strategy = BandedToeplitz((1.0,))
    if isinstance(strategy, Toeplitz) and workload.series() is not None:
        squares = np.cumsum(np.square(workload.apply(strategy.inverse_first_column(steps))))
        moved = float(np.linalg.norm(strategy.first_column(steps)))
    else:
        squares = np.square(row_norms(strategy, np.asarray(workload), steps))
        moved = float(np.linalg.norm(strategy.matrix(steps), axis=0).max())
    if isinstance(strategy, Toeplitz) and epochs > 1 and (column := strategy.first_column(steps)).min() >= 0:
        # The first pattern is the worst: the others sum up the same column, cut off earlier.
        moved = float(np.linalg.norm(summed(column, steps, epochs, period)))
    elif epochs > 1:
        moved = sensitivity(strategy, (np.arange(first, steps, period) for first in range(period)), steps)
    return math.sqrt(float(squares.mean())) * moved
