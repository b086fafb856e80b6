"""Toeplitz strategies of any series: dense matrices, given by one column."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from dpcore.stages.strategies import base
from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.toeplitz import Toeplitz, checked_series

_FILTERED = 4096


@dataclass(frozen=True)
class Coefficients(base.Redrawn, Toeplitz):
    """C of any series. Dense: N_t takes all of Z_0 .. Z_t, drawn again.

    Parameters
    ----------
    series : sequence of float
        c_0 .. c_{T-1} up to their scale, c_0 > 0. As an attribute: scaled to norm 1, the norm of the first column.
    """

    series: tuple[float, ...]
    kind: ClassVar[str] = "toeplitz"

    def __post_init__(self) -> None:
        values = checked_series(series=self.series)
        object.__setattr__(self, "series", tuple(base.scaled(values, float(np.linalg.norm(values))).tolist()))

    @property
    def steps(self) -> int:
        """T."""
        return len(self.series)

    def first_column(self, steps: int) -> Matrix:
        """Return c, (steps,)."""
        return np.array(self.series[:steps])

    def inverse_first_column(self, steps: int) -> Matrix:
        """Return the series of 1/c, (steps,)."""
        return self._inverse[:steps]

    @cached_property
    def _inverse(self) -> Matrix:
        return reciprocal(np.array(self.series))


def reciprocal(series: Matrix) -> Matrix:
    """Return the first coefficients of 1 / c(x), as many as are given.

    Newton's r <- r (2 - c r) doubles those that are right. Fourier transforms make it fast; their rounding is relative
    to the largest coefficients.
    """
    from scipy.signal import fftconvolve, lfilter

    size = len(series)
    if size <= _FILTERED:
        unit = np.zeros(size)
        unit[0] = 1.0
        filtered: Matrix = lfilter([1.0], series, unit)
        return filtered
    inverse = np.array([1 / series[0]])
    while len(inverse) < size:
        length = min(2 * len(inverse), size)
        product = fftconvolve(series[:length], inverse)[:length]
        inverse = 2 * np.pad(inverse, (0, length - len(inverse))) - fftconvolve(inverse, product)[:length]
    return inverse
