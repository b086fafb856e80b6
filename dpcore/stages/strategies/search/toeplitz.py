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

from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.search.series import (
    MOST_FILTERED,
    divided,
    gathered,
    inverse,
    lagged,
    multiplied,
    series_of,
)
from dpcore.stages.strategies.toeplitz import summed
from dpcore.stages.strategies.workload import Workload

Objective = Callable[[Matrix], tuple[float, Matrix]]


_DOUBLED = 512
_COARSER, _SHORTEST = 4, 2048
_NEAR, _SURE = 1e-8, 5e-7
"""Changes of the objective that end a search which began near the optimum, and let it stay at its start."""


def square_root(series: Matrix, size: int) -> Matrix:
    """Return the first coefficients of ``p(x)^(-1/2)`` over the first one: of ``p f' = -p' f / 2``."""
    result = np.zeros(min(size, _DOUBLED))
    result[0] = 1.0
    degree = len(series) - 1
    for k in range(1, len(result)):
        lags = np.arange(1, min(degree, k) + 1)
        result[k] = -(series[lags] * (k - lags / 2) @ result[k - lags]) / (k * series[0])
    while len(result) < size:  # Newton's f <- f (3 - p f^2) / 2 doubles those that are right
        length = min(2 * len(result), size)
        f = np.pad(result, (0, length - len(result)))
        result = 1.5 * f - multiplied(f, multiplied(series / series[0], multiplied(f, f))) / 2
    return result


def toeplitz(workload: Workload, bands: int, epochs: int, period: int) -> Matrix:
    """Return c_0 .. c_{bands-1} of the least mean error where examples take part `epochs` times, `period` apart.

    Of many steps, the search begins with what it finds for fewer: over the square root of the workload, the best
    series of prefix sums hardly depends on their number but for the scale of time.
    """
    return _searched(series_of(workload), workload.steps, bands, epochs, period)[0]


def _searched(series: Matrix, steps: int, bands: int, epochs: int, period: int) -> tuple[Matrix, float]:
    """Return the series, and by how much the search lowered the objective below that of its start."""
    from scipy.optimize import minimize

    start, ending = square_root(series, bands), 1e-13
    if bands == 1:
        return start, 0.0
    short = epochs * (steps // _COARSER // epochs)
    if short >= max(_SHORTEST, 4 * epochs) and (start > 0).all():
        few = bands if 4 * bands <= short else max(2, bands * short // steps)
        found, gain = _searched(series, short, few, epochs, short // epochs)
        start *= np.interp(np.linspace(0, few - 1, bands), np.arange(few), found / start[:few])
        if bands == steps and gain < _SURE:  # and this one would lower it by less
            return start, gain
        ending = _NEAR
    objective = _objective(series, steps, epochs, period)
    options, within = {"maxiter": 500, "ftol": ending, "gtol": 1e-8}, [(0, None)] * (bands - 1)
    last: Any = minimize(objective, start[1:], jac=True, method="L-BFGS-B", bounds=within, options=options)
    return np.concatenate([[1.0], last.x]), objective(start[1:])[0] - last.fun


def _objective(series: Matrix, steps: int, epochs: int, period: int) -> Objective:
    weights, prefix = np.arange(steps, 0, -1) / steps, divided(np.eye(1, steps)[0], series)

    def objective(free: Matrix) -> tuple[float, Matrix]:
        c = np.concatenate([[1.0], free])
        with np.errstate(all="ignore"):
            by_c = None if len(c) <= MOST_FILTERED else inverse(c, steps)
            h = divided(prefix, c) if by_c is None else divided(by_c, series)
            error = float(weights @ h**2)
            if not np.isfinite(error):
                return 1e300, np.zeros_like(free)
            again = divided(h, c) if by_c is None else multiplied(by_c, h)
            slope = -2 * lagged(weights * h, again, len(c)) / error
        moved = summed(c, steps, epochs, period)
        square = float(moved @ moved)
        return np.log(error) + np.log(square), (slope + 2 * gathered(moved, len(c), epochs, period) / square)[1:]

    return objective
