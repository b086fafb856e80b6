"""What a query is: a public linear combination of one example's gradients at public parameter points."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Point(NamedTuple):
    """A gradient that is taken at ``x_t + displacement * d_{t-1}`` and enters the combination times `weight`."""

    weight: float
    displacement: float = 0.0


class Query(Protocol):
    """The vector of example i at step t: ``v_{t,i} = sum_j weight_j grad(x_t + displacement_j d_{t-1}; i)``.

    The points are functions of earlier releases, and the combination is clipped once, after it is formed: whatever the
    weights, one example moves the sum by at most the clip norm.
    """

    @property
    def uses_displacement(self) -> bool:
        """Whether d_{t-1} = x_t - x_{t-1} must be kept."""

    def points(self, step: int) -> tuple[Point, ...]:
        """Return the points of step `step` (from 0); d_{-1} is 0."""
