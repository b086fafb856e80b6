"""Workloads, the matrices A whose error a strategy is chosen for, and the error of a strategy on one.

A maps the released averages g_0 .. g_{T-1} to what is wanted: for SGD the iterates, x_{t+1} - x_0 = -eta (A g)_t. The
noise of what is wanted is A C^{-1} Z.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError
from dpcore.spec import validate
from dpcore.stages.strategies import base
from dpcore.stages.strategies.base import Matrix, Strategy
from dpcore.stages.strategies.sensitivity import sensitivity
from dpcore.stages.strategies.toeplitz import Toeplitz, summed
from dpcore.stages.strategies.workload import Workload, recurrence


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

    What is released are differences Delta_t; G_t = c_t G_{t-1} + Delta_t is the gradient that SGD with momentum takes.

    `decay` is c, or (T,) numbers c_t with c_0 unused; `momentum` is the update's. DP-SRG, section 5: M A L, with A the
    prefix sums, M the momentum and L the accumulation.
    """
    factor = validate.decay(momentum=momentum)
    found = ones(steps) @ accumulation(steps, decay)
    return _named(found if factor == 0 else accumulation(steps, factor) @ found, "recursive gradients")


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


def max_error(strategy: Strategy, workload: npt.ArrayLike, steps: int, patterns: Iterable[npt.ArrayLike]) -> float:
    """Return the largest error of any step at mu = 1: as `rmse`, with the largest row norm of A C^{-1}."""
    return float(row_norms(strategy, workload, steps).max()) * sensitivity(strategy, patterns, steps)


def error_of(strategy: Strategy, workload: Workload, epochs: int = 1, *, largest: bool = False) -> float:
    """Return the root mean squared error at mu = 1, or the largest one; see `rmse`.

    Also over millions of steps where both are Toeplitz.
    """
    steps = workload.steps
    period = -(-steps // epochs)
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
    return math.sqrt(float(squares.max() if largest else squares.mean())) * moved
