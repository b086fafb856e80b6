"""DP-PMLF's query: per-example momentum over the last parameter points."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from dpcore.spec.validate import Checked, Rules, decay, integer
from dpcore.stages.queries.base import Outer, Plain, Point, Query, combined, delayed, lags_behind

_LEAST_LOG = -750.0  # e^-750 is 0 in float64, of which the least number is e^-744.4


@dataclass(frozen=True)
class ParameterWindow(Checked, Outer):
    """``v_{t,i} = sum_{j<k'} (beta^j / c) grad(x_{t-j}; i)`` with ``k' = min(k, t + 1)``, ``c = sum_{j<k'} beta^j``.

    Parameters
    ----------
    window : int
        k >= 1, the number of parameter points; k = 1 is the plain query.
    beta : float
        Decay of the weights, 0 <= beta < 1.
    normalized : bool
        Whether the weights are divided by their sum c (DP-PMLF) or not (InnerOuter).
    query : Query
        What is asked at each of the points; the plain gradient by default.

    Notes
    -----
    The points belong to the run, not to the example: an example's gradients at earlier points are taken anew, in the
    step it takes part in. Its earlier participations are not touched, and nothing is stored for an example. In the
    first steps the window is shorter, and so is c: with the full c the first vectors would be shrunk.

    References
    ----------
    DP-PMLF, algorithm 1; the truncated normalizer is algorithms.md 10.13.
    """

    window: int = 2
    beta: float = 0.1
    normalized: bool = True
    query: Query = field(default_factory=Plain)

    rules: ClassVar[Rules] = {"window": partial(integer, 1), "beta": decay}

    @property
    def lags(self) -> int:
        """Earlier points kept."""
        return lags_behind(self.query, self.window - 1)

    def points(self, step: int) -> tuple[Point, ...]:
        """Return at most `window` points (times those of the inner query)."""
        # Later weights are 0 in float64, and points of weight 0 are left out: nobody counts a billion of them.
        alive = 1 if self.beta == 0 else math.ceil(_LEAST_LOG / math.log(self.beta))
        count = min(self.window, step + 1, alive)
        c = sum(self.beta**j for j in range(count)) if self.normalized else 1.0
        return combined(
            point for j in range(count) for point in delayed(self.query.points(step - j), self.beta**j / c, j)
        )
