"""The gradient at the current parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpcore.stages.queries.base import Point


@dataclass(frozen=True)
class Plain:
    """``v_{t,i} = grad(x_t; i)``, as in DP-SGD."""

    uses_displacement: ClassVar[bool] = False
    lags: ClassVar[int] = 0

    def points(self, step: int) -> tuple[Point, ...]:
        """Return the one point x_t."""
        return (Point(1.0),)
