"""The protocol of a filter: the coefficients of each step of a linear recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.ops import FilterCoefficients

_ROUNDING = 1e-6  # of a double pole on the circle, in `numpy.roots`


class Filter(Protocol):
    """A causal linear filter, public in all its coefficients, which may change from step to step.

    One recurrence, or several in a row. An adaptive filter (`dpcore.filters.OptimalFIR`) has none: it weighs the
    released averages themselves by numbers that are computed from them.
    """

    adaptive: ClassVar[bool]

    @property
    def order(self) -> int:
        """Number of state vectors, each of the parameters' size."""

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return the coefficients of step `step` (from 0): of each recurrence, in the order they are applied.

        Their lengths do not change from step to step. In transposed direct form II, ``a[k-1]`` and ``b[k]`` of step t
        weigh the output and the input of step t inside the output of step t + k.
        """


@dataclass(frozen=True)
class Identity:
    """The update sees each released average as it is."""

    order: ClassVar[int] = 0
    adaptive: ClassVar[bool] = False

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return no recurrence at all."""
        return ()


def check_coefficients(filter: Filter, step: int) -> None:  # noqa: A002
    """Refuse coefficients of a step that make no filter: one of the caller's own may be wrong in any way."""
    name = f"filter={type(filter).__name__}(...)"
    found: Any = filter.coefficients(step)
    if not isinstance(found, tuple) or not all(isinstance(one, FilterCoefficients) and one.b for one in found):
        raise ArgumentTypeError(f"{name}: coefficients({step}) must be a tuple of FilterCoefficients with a b_0 each")
    for b, a, normalizer in found:
        if not np.isfinite([*b, *a, normalizer]).all() or normalizer == 0:
            raise ArgumentError(f"{name}: coefficients({step}) must be finite, and the normalizer not 0")
        largest = np.abs(np.roots([1.0, *a])).max(initial=0.0)
        if largest > 1 + _ROUNDING:
            raise ArgumentError(
                f"{name}: is unstable at step {step}, a pole has modulus {largest:.4g}; no pole may lie outside the "
                "unit circle"
            )
    order = sum(max(len(a), len(b) - 1) for b, a, _ in found)
    if order != filter.order:
        raise ArgumentError(f"{name}: order={filter.order}: must be {order}, the state vectors of its coefficients")
