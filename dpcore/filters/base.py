"""What a filter is: the coefficients of each step of a linear recurrence."""

from __future__ import annotations

from typing import Protocol

from dpcore.spec.ops import FilterCoefficients


class Filter(Protocol):
    """A causal linear filter, public in all its coefficients, which may change from step to step."""

    @property
    def order(self) -> int:
        """Number of state vectors, each of the parameters' size."""

    def coefficients(self, step: int) -> FilterCoefficients:
        """Return the coefficients of step `step` (from 0)."""
