"""Strategies with every entry of the triangle: rows of Z are drawn again at each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dpcore.stages.strategies import base
from dpcore.stages.strategies.banded import Banded, band_count, nonzero
from dpcore.stages.strategies.base import Indices, Matrix

# Beyond so many state vectors of the parameters' size, drawing rows again is taken instead.
MOST_BANDS = 64


class Redrawn(base.Redrawn):
    """A strategy whose noise is made of rows of Z that are drawn again; the matrix C is `entries`."""

    if TYPE_CHECKING:
        steps: int
        entries: Matrix

    @cached_property
    def _inverse(self) -> Matrix:
        from scipy.linalg import solve_triangular

        return np.tril(solve_triangular(self.entries, np.eye(self.steps), lower=True))

    def rows(self, step: int) -> tuple[tuple[int, float], ...]:
        """Return row `step` of C^{-1}, without its zeros."""
        weights = self._inverse[base.check_row(step, self.steps)]
        return nonzero(weights)

    def matrix(self, steps: int) -> Matrix:
        """Return the leading block of C, (steps, steps) float64."""
        size = base.check_block(steps, self.steps)
        return self.entries[:size, :size]

    def columns(self, indices: Indices, steps: int) -> Matrix:
        """Return columns of the leading block, (steps, len(indices))."""
        return np.ascontiguousarray(self.matrix(steps)[:, indices])

    def inverse_row_norms(self, steps: int) -> Matrix:
        """Return the squared row norms of C^{-1}, (steps,)."""
        result: Matrix = np.square(self._inverse[: base.check_block(steps, self.steps)]).sum(axis=1)
        return result


@dataclass(frozen=True)
class Dense(Redrawn):
    """Any lower-triangular matrix.

    N_t is a sum over all of Z_0 .. Z_t, which are drawn again: a run of T steps draws T (T + 1) / 2 rows of noise
    instead of T, and stores none of them. The matrix and its inverse take 16 T^2 bytes.

    Parameters
    ----------
    entries : (T, T) array
        C up to its scale. As an attribute: float64, read-only, scaled so that the largest column norm is 1.

    Attributes
    ----------
    sha256 : str
        Digest of `entries`; two strategies are equal when theirs are.
    """

    entries: Matrix = field(compare=False, repr=False)
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        entries = base.lower_triangular(entries=self.entries)
        entries = base.scaled(entries, float(np.linalg.norm(entries, axis=0).max()))
        object.__setattr__(self, "entries", entries)
        object.__setattr__(self, "sha256", base.digest(entries))

    @property
    def steps(self) -> int:  # type: ignore[override]
        """T."""
        return len(self.entries)

    def describe(self) -> dict[str, Any]:
        """Return the kind, the size and the digest of the entries."""
        return {"kind": "dense", "steps": self.steps, "sha256": self.sha256}


def from_matrix(matrix: npt.ArrayLike) -> Banded | Dense:
    """Return the strategy of a (T, T) array: `Banded` where it has few bands, else `Dense`.

    Few is at most `MOST_BANDS` and fewer than T/2, the rows that a step of `Dense` draws on average.
    """
    full = base.lower_triangular(matrix=matrix)
    bands = band_count(full)
    few = bands == 1 or (bands <= MOST_BANDS and 2 * bands < len(full))
    return Banded.from_matrix(full) if few else Dense(full)
