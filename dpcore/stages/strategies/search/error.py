"""The error of any strategy on a workload, also over millions of steps where both are Toeplitz."""

from __future__ import annotations

import math

import numpy as np

from dpcore.stages.strategies.base import Strategy
from dpcore.stages.strategies.search.series import summed
from dpcore.stages.strategies.sensitivity import sensitivity
from dpcore.stages.strategies.toeplitz import Toeplitz
from dpcore.stages.strategies.workload import Workload
from dpcore.stages.strategies.workloads import row_norms


def error_of(strategy: Strategy, workload: Workload, epochs: int = 1, *, largest: bool = False) -> float:
    """Return the root mean squared error at mu = 1, or the largest one; see `dpcore.strategies.rmse`."""
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
