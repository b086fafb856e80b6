"""The variance of the noise in the update's input, step by step: filters and strategies change it."""

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.recurrence import advance
from dpcore.stages.filters import Filter
from dpcore.stages.strategies import Strategy

Floats = NDArray[np.float64]


def noise_variances(filter: Filter | None, strategy: Strategy | None, steps: int) -> Floats:  # noqa: A002
    """Return the variance of each coordinate's noise after the filter, for seed noise of variance 1: (steps,).

    The noise of step t is row t of ``F C^{-1} Z``, with F the filter as a matrix; its variance is that row's squared
    norm.

    Parameters
    ----------
    filter : Filter or None
        Not adaptive; None is no filter.
    strategy : Strategy or None
        None is independent noise, C = I.
    steps : int
        T. Independent noise costs O(T) here, correlated noise behind a filter O(T^2).
    """
    filtering = filter is not None and filter.order > 0
    if strategy is None and not filtering:
        return np.ones(steps)
    if strategy is not None and not filtering:
        return np.asarray(strategy.inverse_row_norms(steps), dtype=np.float64)
    assert filter is not None
    if strategy is None:
        return _independent(filter, steps)
    return _correlated(filter, strategy, steps)


def _independent(filter: Filter, steps: int) -> Floats:  # noqa: A002
    """Carry the covariance of the filter's state from step to step."""
    order = filter.order
    covariance, variances = np.zeros((order, order)), np.empty(steps)
    for t in range(steps):
        # Basis vectors of (state, input) go through the step; the results are the rows of its matrix.
        basis = np.eye(order + 1)
        state = list(basis[:order])
        y = advance(basis[order], state, filter.coefficients(t))
        before = np.zeros((order + 1, order + 1))
        before[:order, :order], before[order, order] = covariance, 1.0
        step = np.stack(state)
        variances[t] = y @ before @ y
        covariance = step @ before @ step.T
    return variances


def _correlated(filter: Filter, strategy: Strategy, steps: int) -> Floats:  # noqa: A002
    """Make the rows of F C^{-1} one after the other."""
    variances = np.empty(steps)
    state = [np.zeros(steps) for _ in range(filter.order)]
    for t in range(steps):
        row = np.zeros(steps)
        for place, weight in strategy.rows(t):
            row[place] = weight
        y = advance(row, state, filter.coefficients(t))
        variances[t] = y @ y
    return variances
