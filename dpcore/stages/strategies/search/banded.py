"""The best banded strategies whose columns all have norm 1.

With D = A C^{-1}, the squared mean error is ``tr(D^T D) / T``, and its derivative by C is ``-(2/T) D^T D C^{-T}``, of
which the bands are taken. C is given up to the norms of its columns; with at most as many bands as there are steps
between two of an example's, its columns have no row in common, and its squared sensitivity is their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.workload import Workload


def banded(workload: Workload, start: Matrix) -> Matrix:
    """Return the bands (b, T) of the least mean error, from bands to begin with."""
    from scipy.linalg import solve_triangular
    from scipy.optimize import minimize

    count, steps = start.shape
    full = np.asarray(workload)
    band, column = np.nonzero(np.add.outer(np.arange(count), np.arange(steps)) < steps)
    place = band + column, column

    def objective(free: Matrix) -> tuple[float, Matrix]:
        c = np.zeros((steps, steps))
        c[place] = free
        norms = np.linalg.norm(c, axis=0)
        c /= norms
        with np.errstate(all="ignore"):
            d = solve_triangular(c, full.T, lower=True, trans="T", check_finite=False).T  # D C = A
            error = float(np.square(d).sum())
            if not np.isfinite(error) or not (np.diagonal(c) > 0).all():
                return 1e300, np.zeros_like(free)
            slope = -2 * solve_triangular(c, d.T @ d, lower=True, check_finite=False).T[place] / error
        # Along a column its norm changes nothing.
        radial = np.bincount(column, slope * c[place], minlength=steps)
        return np.log(error), (slope - radial[column] * c[place]) / norms[column]

    options = {"maxiter": 300, "ftol": 1e-11}
    found: Any = minimize(objective, start[band, column], jac=True, method="L-BFGS-B", options=options)
    result = np.zeros((count, steps))
    result[band, column] = found.x
    result /= np.linalg.norm(result, axis=0)
    return result
