"""GaLore: filter and moments of a matrix in the subspace of its private gradient's leading left singular vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.validate import integer, plain


@dataclass(frozen=True)
class GaLore:
    """Every `every` steps P takes the top-`rank` left singular vectors of a matrix parameter's released gradient G.

    Filter and moments then run on ``P^T G`` and the direction is mapped back by P: functions of released vectors only.
    The states are rank x n instead of m x n, and are kept when P changes. Parameters that are no matrices, or have at
    most `rank` rows, are not projected; a run that has no others is refused.

    Parameters
    ----------
    rank : int
        Number of singular vectors.
    every : int
        Steps between two singular value decompositions, which are made by NumPy in the host's memory.

    References
    ----------
    DOPPLER (Zhang et al.), algorithm 3; GaLore (Zhao et al. 2024).
    """

    rank: int
    every: int = 200

    def __post_init__(self) -> None:
        plain(self)
        integer(1, rank=self.rank)
        integer(1, every=self.every)

    def projects(self, shape: tuple[int, ...]) -> bool:
        """Return whether a parameter of that shape is projected."""
        return len(shape) == 2 and shape[0] > self.rank and shape[1] > 0

    def projection(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return P, (m, rank), of a finite or non-finite (m, n) gradient and its dtype.

        A gradient with a non-finite entry has no singular vectors; P is then the first columns of the identity.
        """
        m = gradient.shape[0]
        if not np.isfinite(gradient).all():
            return np.eye(m, self.rank, dtype=gradient.dtype)
        u, _, _ = np.linalg.svd(gradient.astype(np.float64), full_matrices=False)
        # With fewer columns than the rank, there are fewer singular vectors: the rest of P is zero and does nothing.
        p = np.zeros((m, self.rank))
        p[:, : min(self.rank, u.shape[1])] = u[:, : self.rank]
        return p.astype(gradient.dtype)
