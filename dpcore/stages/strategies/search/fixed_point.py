"""Anderson's acceleration of a fixed-point iteration."""

from __future__ import annotations

import numpy as np

from dpcore.stages.strategies.base import Matrix

_LARGEST_MOVE = 4.0
_SMALL = 1e-8


class Accelerated:
    """Proposes the next point of ``z <- z + step(z)`` from the last `memory` points and their steps.

    It solves for the combination of these whose steps add up to the least, by least squares. Where a proposal would
    move a coordinate by more than 4 beyond the plain step, or after `forget`, the plain step is taken.

    References
    ----------
    Walker and Ni, "Anderson acceleration for fixed-point iterations", 2011.
    """

    def __init__(self, memory: int = 6) -> None:
        self._memory = memory
        self._points: list[Matrix] = []
        self._steps: list[Matrix] = []

    def forget(self) -> None:
        """Begin anew, as after a proposal that turned out bad."""
        self._points, self._steps = [], []

    def following(self, point: Matrix, step: Matrix) -> Matrix:
        """Return where to go from a point whose plain step is known."""
        self._points = [*self._points, point][-self._memory :]
        self._steps = [*self._steps, step][-self._memory :]
        if len(self._steps) == 1:
            return point + step
        steps, points = np.diff(self._steps, axis=0), np.diff(self._points, axis=0)
        weights = np.linalg.lstsq(steps.T, step, rcond=_SMALL)[0]
        moved = step - weights @ (points + steps)
        if not np.isfinite(moved).all() or np.abs(moved - step).max() > _LARGEST_MOVE:
            self.forget()
            return point + step
        result: Matrix = point + moved
        return result
