"""The best strategies with a banded inverse: N_t = sum_j p_j Z_{t-j}, whose rows are drawn again and never stored.

With p(x) the series of C^{-1}, b coefficients and p_0 = 1, and A the series 1/q(x), the series h = p / q has row t of
A C^{-1}, as in `dpcore.stages.strategies.search.toeplitz`. C is the series c = 1/p, which is dense. Of an example that
takes part at 0, b, ..., (k - 1) b, with G the products of these columns of C, minimized is log E + log S with

    E = (1/n) sum_t (n - t) h_t^2,                    dE/dp_j = (2/n) sum_t (n - t) h_t (1/q)_{t-j},
    S = sum |G|,  w = (1/2) dS/dc,                    dS/dp_j = -2 sum_t w_t (c^2)_{t-j}.

Sums over t are filters that run backward, so each derivative takes the time of the series themselves. S is exact where
c has no negative coefficient, as for all p_1, p_2, ... <= 0; it takes the first pattern for the worst, and of what is
found, that is kept whose error is the least with the sensitivity that holds for it.

A family has one number. `fractional_root`: the first b coefficients of ``(1 - x)^gamma`` (gamma-BIFR, arXiv
2605.18379), of which gamma = 1/2 is the banded inverse square root. Two coefficients are ``1 - lambda x``: each row of
noise takes back a share of the one before (lambda-CGD, arXiv 2601.22334, there with columns scaled to norm 1; here
constant along the diagonals). p_1, p_2, ... are negative, and add up to more than -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.search.series import adjoint, divided, gathered, series_of
from dpcore.stages.strategies.toeplitz import BandedInverseToeplitz, root, summed
from dpcore.stages.strategies.workload import Workload
from dpcore.stages.strategies.workloads import error_of

MOST_SIGNED = 4096
"""Steps up to which coefficients of both signs are tried over epochs: their sensitivity looks at each pattern."""

_TRIED, _ITERATIONS, _FEW = 49, 1000, 32
_COARSER, _SHORTEST, _NEAR = 8, 4096, 1e-9


def banded_inverse(workload: Workload, bands: int, epochs: int, period: int) -> Matrix:
    """Return p_0 .. p_{bands-1} of the least mean error; participation as in `toeplitz`."""
    from scipy.optimize import minimize

    series, steps = series_of(workload), workload.steps
    found = [fractional_root(workload, bands, epochs, period)]
    if bands == 1:
        return found[0]
    objective = _objective(series, steps, epochs, period)
    options = {"maxiter": _ITERATIONS, "maxfun": 2 * _ITERATIONS, "ftol": 1e-13, "gtol": 1e-9, "maxcor": 30}

    def least(start: Matrix, within: Any) -> Matrix:
        falls = -np.diff(np.log(np.cumsum(start)))
        reached: Any = minimize(objective, falls, jac=True, method="L-BFGS-B", bounds=within, options=options)
        found.append(_series(reached.x))
        return found[-1]

    signs = [(0, None)] * (bands - 1)
    short = epochs * (steps // _COARSER // epochs)
    if short >= max(_SHORTEST, 4 * bands, 4 * epochs):
        # So few coefficients hardly depend on the number of steps.
        options["ftol"] = _NEAR
        fewer = Workload(workload.inverse[:, :short], workload.name)
        start = banded_inverse(fewer, bands, epochs, short // epochs)
        least(start, None if epochs == 1 else signs)
        return _best(found, workload, epochs)
    negative = least(found[0], signs)
    if epochs == 1 or steps <= MOST_SIGNED:
        least(negative, None)
        if 2 < bands <= _FEW:
            least(np.pad(fractional_root(workload, 2, epochs, period), (0, bands - 2)), None)
    return _best(found, workload, epochs)


def _best(found: list[Matrix], workload: Workload, epochs: int) -> Matrix:
    steps = workload.steps
    return min(found, key=lambda p: error_of(BandedInverseToeplitz(tuple(p.tolist()), steps), workload, epochs))


def fractional_root(workload: Workload, bands: int, epochs: int, period: int) -> Matrix:
    """Return the first coefficients of (1 - x)^gamma of the least mean error.

    gamma lies in [0, 1), as near to 1 as 1 / (16 steps). Searched is ``u = -log(1 - gamma)``, on a grid and then
    between the neighbors of its best.
    """
    from scipy.optimize import minimize_scalar

    series, steps = series_of(workload), workload.steps
    weights = np.arange(steps, 0, -1) / steps

    def objective(u: float) -> float:
        p = root(-np.expm1(-u), bands)
        moved = summed(divided(np.eye(1, steps)[0], p), steps, epochs, period)
        h = divided(np.pad(p, (0, steps - len(p))), series)
        return float(np.log(weights @ h**2) + np.log(moved @ moved))

    # gamma = 1/2 is one of them: none is worse than the banded inverse square root.
    tried = np.sort(np.append(np.linspace(0, np.log(16 * steps), _TRIED), np.log(2)))
    values = [objective(u) for u in tried]
    best = int(np.argmin(values))
    around = tried[max(best - 1, 0)], tried[min(best + 1, _TRIED)]
    found: Any = minimize_scalar(objective, bounds=around, method="bounded", options={"xatol": 1e-9})
    return root(float(-np.expm1(-(found.x if found.fun < values[best] else tried[best]))), bands)


def _objective(series: Matrix, steps: int, epochs: int, period: int) -> Callable[[Matrix], tuple[float, Matrix]]:
    weights, one = np.arange(steps, 0, -1) / steps, np.eye(1, steps)[0]

    def objective(free: Matrix) -> tuple[float, Matrix]:
        with np.errstate(all="ignore"):
            p = _series(free)
            c, h = divided(one, p), divided(np.pad(p, (0, steps - len(p))), series)
            error, (square, wanted) = float(weights @ h**2), moves(c, epochs, period)
            if not np.isfinite(error * square):  # so far off that C overflows
                return 1e300, np.zeros_like(free)
            slope = 2 * adjoint(weights * h, series)[: len(p)] / error
            slope -= 2 * adjoint(adjoint(wanted, p), p)[: len(p)] / square
        # r_j = exp(-u_1 - ... - u_j), and p_j = r_j - r_{j-1}.
        by_partial = (slope - np.append(slope[1:], 0.0)) * np.cumsum(p)
        return float(np.log(error) + np.log(square)), -np.cumsum(by_partial[::-1])[::-1][1:]

    return objective


def _series(falls: Matrix) -> Matrix:
    """Return p_0, p_1, ... whose partial sums have these falls of their logarithms."""
    return np.diff(np.exp(-np.cumsum(np.concatenate([[0.0], falls]))), prepend=0.0)


def moves(c: Matrix, epochs: int, period: int) -> tuple[float, Matrix]:
    """Return ``sum |G|`` of the first pattern, and half its derivative by c, (steps,)."""
    steps = len(c)
    if epochs == 1 or steps > MOST_SIGNED or not (c < 0).any():
        moved = summed(c, steps, epochs, period)
        return float(moved @ moved), gathered(moved, steps, epochs, period)
    firsts = np.arange(0, steps, period)
    columns = np.stack([np.pad(c[: steps - first], (first, 0)) for first in firsts.tolist()])
    products = columns @ columns.T
    signed = np.sign(products) @ columns
    wanted = np.zeros(steps)
    for first, row in zip(firsts, signed, strict=True):
        wanted[: steps - first] += row[first:]
    return float(np.abs(products).sum()), wanted
