"""What a filter is: the coefficients of each step of a linear recurrence."""

from __future__ import annotations

from typing import ClassVar, Protocol

from dpcore.spec.ops import FilterCoefficients


class Filter(Protocol):
    """A causal linear filter, public in all its coefficients, which may change from step to step.

    One recurrence, or several in a row. An adaptive filter (`dpcore.stages.filters.OptimalFIR`) has none: it weighs the
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
