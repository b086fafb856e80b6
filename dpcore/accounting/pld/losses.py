"""What a composition is made of: steps whose losses have known masses, or bounds on them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Losses(Protocol):
    """Steps of one shape, computed together; `Family` has exact masses, `Allocation` bounds on them."""

    @property
    def weights(self) -> Array:
        """Of the mixture of each step, (steps, components)."""

    @property
    def rates(self) -> Array:
        """Sample rates, likewise."""

    @property
    def sigmas(self) -> Array:
        """Noise multipliers, likewise."""

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often each step occurs, (steps,)."""

    @property
    def subset(self) -> bool:
        """Whether the steps draw subsets of fixed size."""

    def of(self, chosen: npt.NDArray[np.intp], counts: npt.NDArray[np.int64], /) -> Losses:
        """Return some of the steps, with other counts."""

    def fitted(self, fine: int, /) -> Losses:
        """Return the same, as finely resolved as a grid of losses with so many points per doubling."""

    def bounded(self, bound: str, /) -> Losses:
        """Return the same as an "upper" or a "lower" bound."""

    def aimed(self, theta: float, loss: float, /) -> Losses:
        """Return the same for a tilt of the composition, and the loss of a step that is the mean under it."""

    def masses(self, direction: str, edges: Array, /) -> tuple[Array, Array]:
        """Return the P-mass and the Q-mass (steps, n) of each loss interval; `edges` (steps, n + 1)."""

    def reach(self, direction: str, low: float, high: float, /) -> tuple[Array, Array]:
        """Return losses (steps, 1) beyond which P has at most about ndtr(-low) below and ndtr(-high) above."""

    def thick(self, direction: str, /) -> Array:
        """Return per step (steps, 1) a loss where P is thick."""


def center(family: Losses, direction: str, width: float) -> Array:
    """Return per step (steps, 1) a loss r such that P/Q = e^r on the losses within width/2 of r, where P is thick.

    The rare-event case needs it: nearly all of P lies within much less than a grid cell, and moving it by a part of a
    cell in every one of T steps would move the total by T parts of a cell.
    """
    if family.subset:
        return np.zeros((family.weights.shape[0], 1))
    r = family.thick(direction)
    for _ in range(12):
        p, q = family.masses(direction, np.hstack([r - 0.5 * width, r + 0.5 * width]))
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = np.log(p) - np.log(q)
        r = np.where(np.isfinite(moved), np.clip(moved, r - 0.5 * width, r + 0.5 * width), r)
    return r
