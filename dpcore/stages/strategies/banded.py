"""Banded strategies that may change from step to step; the identity has one band.

Streaming. Row t of C N = Z reads C[t,t] N_t + sum_j C[t,t-j] N_{t-j} = Z_t, so that

    N_t = (Z_t - sum_{0<j<b} C[t,t-j] N_{t-j}) / C[t,t]:

step t needs row t of C and a ring of the last b - 1 vectors N (`dpcore.spec.ops.RingCoefficients`), of which it reads
all and writes one. C^{-1} itself is dense; cut to b entries a row it would be another strategy, with another
sensitivity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError
from dpcore.spec.ops import FilterCoefficients, RingCoefficients
from dpcore.stages.strategies import base
from dpcore.stages.strategies.base import Indices, Matrix


@dataclass(frozen=True)
class Identity(base.Whole):
    """C = I: the noise of each step is its own row of Z. DP-SGD is this matrix mechanism."""

    order: ClassVar[int] = 0
    steps: ClassVar[int | None] = None

    def coefficients(self, step: int) -> FilterCoefficients:
        """Return the recurrence that changes nothing."""
        base.check_row(step, None)
        return FilterCoefficients((1.0,), ())

    def rows(self, step: int) -> tuple[tuple[int, float], ...]:
        """Return the row itself."""
        return ((base.check_row(step, None), 1.0),)

    def columns(self, indices: Indices, steps: int) -> Matrix:
        """Return columns of the identity, (steps, len(indices))."""
        return np.equal.outer(np.arange(steps), indices).astype(np.float64)

    def inverse_row_norms(self, steps: int) -> Matrix:
        """Return ones, (steps,)."""
        return np.ones(steps)

    def describe(self) -> dict[str, Any]:
        """Return the kind."""
        return {"kind": "identity"}


@dataclass(frozen=True)
class Banded(base.Whole):
    """A lower-triangular matrix with b bands: C[t, s] = 0 for t - s >= b.

    Streams from a ring of b - 1 vectors of the parameters' size; they are as secret as the noise.

    Parameters
    ----------
    bands : (b, T) array
        The columns of C from the diagonal down, up to their common scale: ``bands[k, t] = C[t + k, t]``, 0 where
        t + k >= T. As an attribute: float64, read-only, scaled so that the largest column norm is 1; `sha256` is the
        digest, and two strategies are equal when theirs are.
    """

    bands: Matrix = field(compare=False, repr=False)
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        bands = base.finite_array(2, bands=self.bands)
        count, steps = bands.shape
        if count > steps:
            raise ArgumentError(f"bands.shape={bands.shape}: must be (b, T) with at most T = {steps} bands")
        base.check_diagonal(bands[0], "bands")
        beyond = np.add.outer(np.arange(count), np.arange(steps)) >= steps
        if bands[beyond].any():
            k, t = (int(i) for i in np.argwhere(beyond & (bands != 0))[0])
            raise ArgumentError(f"bands: the entry at ({k}, {t}) stands for row {t + k} of {steps} and must be 0")
        bands = base.scaled(bands, float(np.linalg.norm(bands, axis=0).max()))
        object.__setattr__(self, "bands", bands)
        object.__setattr__(self, "sha256", base.digest(bands))

    @classmethod
    def from_matrix(cls, matrix: npt.ArrayLike) -> Banded:
        """Return the strategy of a (T, T) array, C up to its scale, with as many bands as have an entry."""
        full = base.lower_triangular(matrix=matrix)
        bands = np.zeros((band_count(full), len(full)))
        for k, band in enumerate(bands):
            band[: len(full) - k] = np.diagonal(full, -k)
        return cls(bands)

    @property
    def order(self) -> int:
        """The bands but the diagonal: b - 1."""
        return len(self.bands) - 1

    @property
    def steps(self) -> int:
        """T."""
        return int(self.bands.shape[1])

    def coefficients(self, step: int) -> RingCoefficients:
        """Return the weights -C[t,t-j] and the normalizer C[t,t]; see the module."""
        t = base.check_row(step, self.steps)
        weights = [-float(self.bands[j, t - j]) if j <= t else 0.0 for j in range(1, len(self.bands))]
        return ring_of(weights, t, float(self.bands[0, t]), "output")

    def rows(self, step: int) -> tuple[tuple[int, float], ...]:
        """Return the dense row of C^{-1}: for study, the recurrence streams it."""
        from scipy.linalg import solve_banded

        size = base.check_row(step, self.steps) + 1
        target = np.zeros(size)
        target[step] = 1.0
        # C^T w = e_step. The transpose is upper banded, and `solve_banded` stores band k of it from column k on.
        count = min(len(self.bands), size)
        upper = np.zeros((count, size))
        for k in range(count):
            upper[count - 1 - k, k:] = self.bands[k, : size - k]
        weights = solve_banded((0, count - 1), upper, target)
        return nonzero(weights)

    def columns(self, indices: Indices, steps: int) -> Matrix:
        """Return columns of the leading block, (steps, len(indices))."""
        base.check_block(steps, self.steps)
        result = np.zeros((steps, len(indices)))
        for place, t in enumerate(indices):
            size = min(len(self.bands), steps - t)
            result[t : t + size, place] = self.bands[:size, t]
        return result

    def inverse_row_norms(self, steps: int) -> Matrix:
        """Return the squared row norms of C^{-1}, (steps,): time steps x bands^2, nothing of size steps^2.

        Notes
        -----
        They are the variances of N_t = (Z_t - v N_past) / c with v = C[t, t-b+1 .. t-1], c = C[t,t]. Z_t is independent
        of N_past, whose covariance W is known from the steps before: ``Var N_t = (1 + v W v) / c^2`` and
        ``Cov(N_past, N_t) = -W v / c``, which fills the window of the next step. Sums of squares only: nothing cancels.
        """
        base.check_block(steps, self.steps)
        past = self.order
        result = np.empty(steps)
        window = np.zeros((past + 1, past + 1))  # covariance of N_{t-past} .. N_t
        for t in range(steps):
            window[:-1, :-1] = window[1:, 1:].copy()
            v = np.zeros(past)
            for k in range(1, min(past, t) + 1):
                v[past - k] = self.bands[k, t - k]
            c = self.bands[0, t]
            cross = window[:-1, :-1] @ v
            result[t] = (1.0 + v @ cross) / c**2
            window[:-1, -1] = window[-1, :-1] = -cross / c
            window[-1, -1] = result[t]
        return result

    def describe(self) -> dict[str, Any]:
        """Return the kind, the sizes and the digest of the bands."""
        return {"kind": "banded", "bands": len(self.bands), "steps": self.steps, "sha256": self.sha256}


def nonzero(weights: Matrix) -> tuple[tuple[int, float], ...]:
    """Return a row of C^{-1} as (row of Z, weight) pairs, zeros left out."""
    rows = np.flatnonzero(weights)
    return tuple(zip(rows.tolist(), weights[rows].tolist(), strict=True))


def ring_of(weights: Sequence[float], step: int, normalizer: float, keeps: str) -> RingCoefficients:
    """Return step `step` of a ring: its place is the step modulo the number of vectors."""
    return RingCoefficients(tuple(weights), step % max(len(weights), 1), normalizer, keeps)


def band_count(matrix: Matrix) -> int:
    """Return the number of bands of a lower-triangular matrix, the diagonal among them."""
    row, column = np.nonzero(matrix)
    return int((row - column).max()) + 1
