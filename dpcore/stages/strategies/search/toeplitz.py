"""The best Toeplitz strategies for Toeplitz workloads: by bands, and buffered linear (BLT).

With c(x) the series of C, and A the series 1/p(x), A C^{-1} is the series h = 1 / (p c), so its row t has the squared
norm ``h_0^2 + ... + h_t^2`` and the squared mean error of n steps is ``E(c) = (1/n) sum_t (n - t) h_t^2``. An example
that takes part at 0, b, ..., (k - 1) b moves the sums by the series ``s_t = sum_i c_{t - i b}``, of squared norm S(c).
What is minimized is log E + log S, which does not change with the scale of c, so c_0 = 1. Its derivatives:

    dE/dc_j = -(2/n) sum_t (n - t) h_t (h/c)_{t-j},      dS/dc_j = 2 sum_i s_{j + i b}.

The last one takes the first pattern for the worst, which it is for a c that is positive and does not rise; whatever c
is found, its error is computed with the sensitivity that holds for it (`dpcore.stages.strategies.sensitivity`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.spec.recurrence import response
from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.coefficients import reciprocal
from dpcore.stages.strategies.workload import Workload

Objective = Callable[[Matrix], tuple[float, Matrix]]

MOST_FILTERED = 4096
"""So many coefficients are divided by as a recurrence; more by Fourier transforms."""


def series_of(workload: Workload) -> Matrix:
    """Return p_0, p_1, ... of the workload 1/p(x); refuses one that is not Toeplitz."""
    found = workload.series()
    if found is None:
        raise ArgumentError(
            f"workload={workload.name!r}: must be constant along its diagonals for a Toeplitz strategy; take a dense "
            "or a banded one"
        )
    return found


def square_root(series: Matrix, size: int) -> Matrix:
    """Return the first coefficients of ``p(x)^(-1/2)`` over the first one: of ``p f' = -p' f / 2``."""
    result = np.zeros(size)
    result[0] = 1.0
    degree = len(series) - 1
    for k in range(1, size):
        lags = np.arange(1, min(degree, k) + 1)
        result[k] = -(series[lags] * (k - lags / 2) @ result[k - lags]) / (k * series[0])
    return result


def toeplitz(workload: Workload, bands: int, epochs: int, period: int) -> Matrix:
    """Return c_0 .. c_{bands-1} of the least mean error where examples take part `epochs` times, `period` apart."""
    from scipy.optimize import minimize

    series, steps = series_of(workload), workload.steps
    weights = np.arange(steps, 0, -1) / steps

    def objective(free: Matrix) -> tuple[float, Matrix]:
        c = np.concatenate([[1.0], free])
        with np.errstate(all="ignore"):
            h = _divided(response((1.0,), tuple(series), steps), c)
            error = float(weights @ h**2)
            if not np.isfinite(error):
                return 1e300, np.zeros_like(free)
            slope = -2 * _lagged(weights * h, _divided(h, c), len(c)) / error
        moved = summed(c, steps, epochs, period)
        square = float(moved @ moved)
        return np.log(error) + np.log(square), (slope + 2 * _gathered(moved, len(c), epochs, period) / square)[1:]

    start = square_root(series, bands)
    if bands == 1:
        return start
    within = [(0, None)] * (bands - 1)
    options = {"maxiter": 500, "ftol": 1e-13}
    found: Any = minimize(objective, start[1:], jac=True, method="L-BFGS-B", bounds=within, options=options)
    return np.concatenate([[1.0], found.x])


def summed(c: Matrix, steps: int, epochs: int, period: int) -> Matrix:
    """Return ``s_t = sum_i c_{t - i period}``, (steps,)."""
    moved = np.zeros(steps)
    for first in range(0, min(epochs * period, steps), period):
        size = min(len(c), steps - first)
        moved[first : first + size] += c[:size]
    return moved


def _gathered(moved: Matrix, size: int, epochs: int, period: int) -> Matrix:
    """Return ``sum_i s_{j + i period}`` for j below `size`."""
    result = np.zeros(size)
    for first in range(0, min(epochs * period, len(moved)), period):
        part = moved[first : first + size]
        result[: len(part)] += part
    return result


def _lagged(left: Matrix, right: Matrix, count: int) -> Matrix:
    """Return ``sum_t left_t right_{t-j}`` for j below `count`."""
    from scipy.signal import fftconvolve

    size = len(left)
    result: Matrix = fftconvolve(left, right[::-1])[size - 1 : size - 1 + count]
    return result


def _divided(series: Matrix, by: Matrix) -> Matrix:
    """Return the series over another, as long as itself."""
    from scipy.signal import fftconvolve, lfilter

    if len(by) <= MOST_FILTERED:
        filtered: Matrix = lfilter([1.0], by, series)
        return filtered
    result: Matrix = fftconvolve(series, reciprocal(by))[: len(series)]
    return result
