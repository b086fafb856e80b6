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

from dpcore.spec.recurrence import response
from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.search.series import divided, gathered, lagged, series_of, summed
from dpcore.stages.strategies.workload import Workload

Objective = Callable[[Matrix], tuple[float, Matrix]]


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
            h = divided(response((1.0,), tuple(series), steps), c)
            error = float(weights @ h**2)
            if not np.isfinite(error):
                return 1e300, np.zeros_like(free)
            slope = -2 * lagged(weights * h, divided(h, c), len(c)) / error
        moved = summed(c, steps, epochs, period)
        square = float(moved @ moved)
        return np.log(error) + np.log(square), (slope + 2 * gathered(moved, len(c), epochs, period) / square)[1:]

    start = square_root(series, bands)
    if bands == 1:
        return start
    within = [(0, None)] * (bands - 1)
    options = {"maxiter": 500, "ftol": 1e-13}
    found: Any = minimize(objective, start[1:], jac=True, method="L-BFGS-B", bounds=within, options=options)
    return np.concatenate([[1.0], found.x])
