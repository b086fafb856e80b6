"""Independent noise as a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dpcore.spec.ops import FilterCoefficients
from dpcore.stages.strategies.base import Indices, Matrix, Whole, check_row


@dataclass(frozen=True)
class Identity(Whole):
    """C = I: the noise of each step is its own row of Z. DP-SGD is this matrix mechanism."""

    order: ClassVar[int] = 0
    steps: ClassVar[int | None] = None

    def coefficients(self, step: int) -> FilterCoefficients:
        """Return the recurrence that changes nothing."""
        check_row(step, None)
        return FilterCoefficients((1.0,), ())

    def rows(self, step: int) -> tuple[tuple[int, float], ...]:
        """Return the row itself."""
        return ((check_row(step, None), 1.0),)

    def matrix(self, steps: int) -> Matrix:
        """Return the identity, (steps, steps) float64."""
        return np.eye(steps)

    def columns(self, indices: Indices, steps: int) -> Matrix:
        """Return columns of the identity, (steps, len(indices))."""
        return np.equal.outer(np.arange(steps), indices).astype(np.float64)

    def inverse_row_norms(self, steps: int) -> Matrix:
        """Return ones, (steps,)."""
        return np.ones(steps)

    def describe(self) -> dict[str, Any]:
        """Return the kind."""
        return {"kind": "identity"}
