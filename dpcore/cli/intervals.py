"""Intervals of 95 % for means over seeds and for their differences.

References
----------
Student, "The probable error of a mean", 1908.
Welch, "The generalization of Student's problem when several different population variances are involved", 1947.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError
from dpcore.spec import special


@dataclass(frozen=True)
class Estimate:
    """An estimate and the half width of its interval; the half width is NaN where the values cannot tell it."""

    center: float
    half_width: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval is known and does not hold 0."""
        return abs(self.center) > self.half_width


def mean_interval(values: npt.ArrayLike) -> Estimate:
    """Return the mean of independent values with Student's interval, ``t s / sqrt(n)``; one value has none."""
    sample = _sample(values)
    if len(sample) == 1:
        return Estimate(float(sample[0]), math.nan)
    return _estimate(sample.mean(), sample.var(ddof=1) / len(sample), len(sample) - 1)


def difference_interval(first: npt.ArrayLike, second: npt.ArrayLike) -> Estimate:
    """Return the difference of the means of two independent samples with Welch's interval.

    It does not assume equal variances. With fewer than two values in either there is none.
    """
    a, b = _sample(first), _sample(second)
    center = a.mean() - b.mean()
    if min(len(a), len(b)) < 2:
        return Estimate(float(center), math.nan)
    u, v = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    if u + v == 0:
        return Estimate(float(center), 0.0)
    return _estimate(center, u + v, (u + v) ** 2 / (u**2 / (len(a) - 1) + v**2 / (len(b) - 1)))


def _sample(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    sample = np.asarray(values, np.float64)
    if sample.ndim != 1 or not sample.size:
        raise ArgumentError(f"values: have shape {sample.shape}; must be one row of at least one value")
    return sample


def _estimate(center: float, variance: float, freedom: float) -> Estimate:
    return Estimate(float(center), float(special.stdtrit(freedom, 0.975)) * math.sqrt(variance))
