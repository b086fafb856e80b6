"""Power series of as many coefficients as there are steps: quotients, their transposes, and shifted sums."""

from __future__ import annotations

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.toeplitz import reciprocal
from dpcore.stages.strategies.workload import Workload

MOST_FILTERED = 512
"""So many coefficients are divided by as a recurrence; more by Fourier transforms."""

_DIRECT, _BLOCK, _TINY = 64, 1 << 14, 1e-250


def series_of(workload: Workload) -> Matrix:
    """Return p_0, p_1, ... of the workload 1/p(x); refuses one that is not Toeplitz."""
    found = workload.series()
    if found is None:
        raise ArgumentError(
            f"workload={workload.name!r}: must be constant along its diagonals for a Toeplitz strategy; take a dense "
            "or a banded one"
        )
    return found


def divided(series: Matrix, by: Matrix) -> Matrix:
    """Return the series over another, as long as itself."""
    from scipy.signal import fftconvolve, lfilter

    if len(by) <= MOST_FILTERED:
        result, state = np.empty(len(series)), np.zeros(len(by) - 1)
        for first in range(0, len(series), _BLOCK):
            block = slice(first, first + _BLOCK)
            result[block], state = lfilter([1.0], by, series[block], zi=state)
            state[np.abs(state) < _TINY] = 0.0  # subnormal numbers take a hundred times as long
        return result
    whole: Matrix = fftconvolve(series, inverse(by, len(series)))[: len(series)]
    return whole


def inverse(series: Matrix, size: int) -> Matrix:
    """Return the first coefficients of 1 over the series, (size,)."""
    if len(series) <= MOST_FILTERED:
        return divided(np.eye(1, size)[0], series)
    return reciprocal(np.pad(series, (0, size - len(series))))


def multiplied(left: Matrix, right: Matrix) -> Matrix:
    """Return the product of two series, as long as the second."""
    from scipy.signal import fftconvolve, lfilter

    if len(left) <= _DIRECT:
        filtered: Matrix = lfilter(left, [1.0], right)
        return filtered
    result: Matrix = fftconvolve(left, right)[: len(right)]
    return result


def adjoint(values: Matrix, by: Matrix) -> Matrix:
    """Return ``sum_t values_t (1/by)_{t-j}`` for all j: the transpose of `divided`."""
    return divided(values[::-1], by)[::-1]


def gathered(moved: Matrix, size: int, epochs: int, period: int) -> Matrix:
    """Return ``sum_i s_{j + i period}`` for j below `size`."""
    result = np.zeros(size)
    for first in range(0, min(epochs * period, len(moved)), period):
        part = moved[first : first + size]
        result[: len(part)] += part
    return result


def lagged(left: Matrix, right: Matrix, count: int) -> Matrix:
    """Return ``sum_t left_t right_{t-j}`` for j below `count`."""
    from scipy.signal import fftconvolve

    size = len(left)
    if count <= _DIRECT:
        return np.array([left[lag:] @ right[: size - lag] for lag in range(count)])
    result: Matrix = fftconvolve(left, right[::-1])[size - 1 : size - 1 + count]
    return result
