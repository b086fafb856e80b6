"""What a strategy is chosen for: a lower-triangular matrix A whose inverse has few bands.

A maps the released averages g_0 .. g_{T-1} to what is wanted. Wanted vectors follow from a recurrence (an iterate from
the one before, a momentum from the one before, ...), and A^{-1} is that recurrence: it has two bands, and a product of
k of them has k + 1. So A is applied in time T, and (A^T A)^{-1} = A^{-1} A^{-T} is banded, which is what makes the
least error of any mechanism cheap to find (`dpcore.stages.strategies.search`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError
from dpcore.stages.strategies import base
from dpcore.stages.strategies.base import Matrix


@dataclass(frozen=True, eq=False)
class Workload:
    """A lower-triangular matrix A, given by its inverse.

    Parameters
    ----------
    inverse : (b, T) array
        The columns of A^{-1} from the diagonal down: ``inverse[k, t] = A^{-1}[t + k, t]``, 0 where t + k >= T. The
        diagonal is positive.
    name : str
        For tables and pictures.

    Notes
    -----
    NumPy takes it for the (T, T) array of A; ``first @ second`` is the product of two, or A times an array.
    """

    inverse: Matrix = field(repr=False)
    name: str = "workload"

    def __post_init__(self) -> None:
        inverse = base.finite_array(2, inverse=self.inverse)
        count, steps = inverse.shape
        if count > steps:
            raise ArgumentError(f"inverse.shape={inverse.shape}: must be (b, T) with at most T = {steps} bands")
        base.check_diagonal(inverse[0], "inverse")
        inverse[np.add.outer(np.arange(count), np.arange(steps)) >= steps] = 0.0
        inverse.flags.writeable = False
        object.__setattr__(self, "inverse", inverse)

    @property
    def steps(self) -> int:
        """T."""
        return int(self.inverse.shape[1])

    def apply(self, vectors: Matrix) -> Matrix:
        """Return A times a (T,) or (T, m) array: the recurrence, run forward."""
        from scipy.linalg.lapack import dtbtrs

        result, _ = dtbtrs(self.inverse, vectors, uplo="L")
        found: Matrix = np.asarray(result)
        return found.reshape(np.shape(vectors))

    def series(self) -> Matrix | None:
        """Return the first column of A^{-1}, (b,), where A is Toeplitz; else None."""
        first = self.inverse[:, 0]
        rows = np.add.outer(np.arange(len(self.inverse)), np.arange(self.steps))
        same = np.where(rows < self.steps, self.inverse == first[:, None], True).all()
        return first if same else None

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return A, (T, T)."""
        return self.apply(np.eye(self.steps)).astype(dtype or np.float64, copy=False)

    def __matmul__(self, other: Any) -> Any:
        """Return the workload of A times another, or A times an array."""
        if not isinstance(other, Workload):
            return self.apply(np.asarray(other, dtype=np.float64))
        if other.steps != self.steps:
            raise ArgumentError(f"steps={other.steps}: must be {self.steps}, as of the other workload")
        # (A B)^{-1} = B^{-1} A^{-1}: column t of A^{-1} combines columns t, t + 1, ... of B^{-1}.
        count = min(len(self.inverse) + len(other.inverse) - 1, self.steps)
        product = np.zeros((count, self.steps))
        for k, band in enumerate(self.inverse):
            for j, column in enumerate(other.inverse):
                if k + j < count:
                    product[k + j, : self.steps - k] += column[k:] * band[: self.steps - k]
        return Workload(product, f"{self.name} of {other.name}")

    def describe(self) -> dict[str, Any]:
        """Return name, size and the digest of the bands as JSON values."""
        return {"name": self.name, "steps": self.steps, "sha256": base.digest(self.inverse)}


def recurrence(factors: npt.ArrayLike, weights: npt.ArrayLike, name: str) -> Workload:
    """Return the workload of ``y_t = factors_t y_{t-1} + weights_t x_t``; (T,) each, weights positive."""
    factors, weights = np.asarray(factors, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    steps = len(weights)
    bands = np.zeros((min(2, steps), steps))
    bands[0] = 1 / weights
    if steps > 1:
        bands[1, :-1] = -factors[1:] / weights[1:]
    return Workload(bands, name)
