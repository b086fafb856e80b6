"""Intervals of 95 % for means over seeds and for their differences.

References
----------
Student, "The probable error of a mean", 1908.
Welch, "The generalization of Student's problem when several different population variances are involved", 1947.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError
from dpcore.spec import special


class Estimate(NamedTuple):
    """An estimate and the half width of its interval, which is NaN if the values do not determine it."""

    center: float
    half_width: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval is known and does not contain 0."""
        return abs(self.center) > self.half_width


def mean_interval(values: npt.ArrayLike) -> Estimate:
    """Return the mean of independent values with Student's interval, ``t s / sqrt(n)``; one value has none."""
    return _estimate(*_mean(values))


def difference_interval(first: npt.ArrayLike, second: npt.ArrayLike) -> Estimate:
    """Return the difference of the means of two independent samples with Welch's interval.

    It does not assume equal variances. There is no interval if either sample has fewer than two values.
    """
    (a, u, m), (b, v, n) = _mean(first), _mean(second)
    return _estimate(a - b, u + v, (u + v) ** 2 / (u**2 / m + v**2 / n) if u + v and m and n else min(m, n))


def _mean(values: npt.ArrayLike) -> tuple[float, float, int]:
    """Return the mean, its variance and the degrees of freedom."""
    sample = np.asarray(values, np.float64)
    if sample.ndim != 1 or not sample.size:
        raise ArgumentError(f"values: have shape {sample.shape}; must be one row of at least one value")
    freedom = len(sample) - 1
    return float(sample.mean()), float(sample.var(ddof=1)) / len(sample) if freedom else 0.0, freedom


def _estimate(center: float, variance: float, freedom: float) -> Estimate:
    return Estimate(center, float(special.stdtrit(freedom, 0.975)) * math.sqrt(variance) if freedom else math.nan)
