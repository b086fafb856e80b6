"""Intervals for means over seeds and for their differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError
from dpcore.spec import validate


@dataclass(frozen=True)
class Estimate:
    """A mean, or a difference of means, with the half width of its interval: NaN where the values cannot tell it."""

    center: float
    half_width: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.center - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.center + self.half_width

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval is known and does not hold 0."""
        return abs(self.center) > self.half_width


def mean_interval(values: Sequence[float] | npt.NDArray[np.float64], confidence: float = 0.95) -> Estimate:
    """Return the mean of independent values with Student's interval, ``t s / sqrt(n)``.

    Parameters
    ----------
    values : sequence of float
        At least one; a single one has no interval (half width NaN).
    confidence : float
        Strictly between 0 and 1.

    Raises
    ------
    ArgumentError
        For no values.

    References
    ----------
    Student, "The probable error of a mean", 1908.
    """
    sample = _sample(values)
    level = 0.5 + validate.open_unit(confidence=confidence) / 2
    if len(sample) == 1:
        return Estimate(float(sample[0]), math.nan)
    error = sample.std(ddof=1) / math.sqrt(len(sample))
    return Estimate(float(sample.mean()), float(_quantile(len(sample) - 1, level) * error))


def difference_interval(
    first: Sequence[float] | npt.NDArray[np.float64],
    second: Sequence[float] | npt.NDArray[np.float64],
    confidence: float = 0.95,
) -> Estimate:
    """Return the difference of two means with Welch's interval, which does not assume equal variances.

    Parameters
    ----------
    first, second : sequences of float
        Independent samples; with fewer than two values in either the half width is NaN.
    confidence : float
        Strictly between 0 and 1.

    Raises
    ------
    ArgumentError
        For no values.

    References
    ----------
    Welch, "The generalization of Student's problem when several different population variances are involved", 1947.
    """
    a, b = _sample(first), _sample(second)
    level = 0.5 + validate.open_unit(confidence=confidence) / 2
    center = float(a.mean() - b.mean())
    if min(len(a), len(b)) < 2:
        return Estimate(center, math.nan)
    u, v = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    if u + v == 0:
        return Estimate(center, 0.0)
    freedom = (u + v) ** 2 / (u**2 / (len(a) - 1) + v**2 / (len(b) - 1))
    return Estimate(center, float(_quantile(freedom, level) * math.sqrt(u + v)))


def _sample(values: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    sample = np.asarray(values, np.float64)
    if sample.ndim != 1 or not sample.size:
        raise ArgumentError(f"values: have shape {sample.shape}; must be one row of at least one value")
    return sample


def _quantile(freedom: float, level: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, level))
