"""GaLore: filter and moments of a matrix in the subspace of its private gradient's leading left singular vectors."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.validate import Checked, Rules, integer


@dataclass(frozen=True)
class GaLore(Checked):
    """Every `every` steps P takes the top-`rank` left singular vectors of a matrix parameter's released gradient G.

    Filter and moments then run on ``P^T G`` and the direction is mapped back by P: functions of released vectors only.
    The states are rank x n instead of m x n, and are kept when P changes, as coordinates in the new basis: so of all
    bases of the new subspace P is the one nearest to the old. Parameters that are no matrices, or have at
    most `rank` rows, are not projected; a run that has no others is refused.

    Parameters
    ----------
    rank : int
        Number of singular vectors.
    every : int
        Steps between two decompositions, which NumPy makes in the host's memory.

    References
    ----------
    DOPPLER (Zhang et al.), algorithm 3; GaLore (Zhao et al. 2024).
    """

    rank: int
    every: int = 200

    rules: ClassVar[Rules] = {"rank": partial(integer, 1), "every": partial(integer, 1)}

    def projects(self, shape: tuple[int, ...]) -> bool:
        """Return whether a parameter of that shape is projected."""
        return len(shape) == 2 and shape[0] > self.rank and shape[1] > 0

    def projection(self, gradient: NDArray[Any], previous: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return P, (m, rank), of a finite or non-finite (m, n) gradient and its dtype.

        A gradient with a non-finite entry has no singular vectors; the first columns of the identity replace them.
        `previous` is the last P; None or zeros at the first step.

        Notes
        -----
        Singular vectors U are unique only up to signs, and if noise makes singular values nearly equal they change
        places and mix. A kept state f means P_old f, and after the refresh U Q f, Q orthogonal. Over all
        directions of f the change is least for ``min ||U Q - P_old||``, solved by the polar factor of ``U^T P_old``
        (orthogonal Procrustes). A second moment belongs to its coordinates too, and no orthogonal map but signed
        permutations takes it along; with this Q a refresh that finds the old subspace returns the old P and changes
        nothing, while signs alone would leave moments to coordinates that have turned.
        """
        m, n = gradient.shape
        # With fewer columns than the rank, there are fewer singular vectors: the rest of P is zero and does nothing.
        count = min(self.rank, n)
        p = np.eye(m, self.rank)
        p[:, count:] = 0.0
        if np.isfinite(gradient).all():
            p[:, :count] = np.linalg.svd(gradient.astype(np.float64), full_matrices=False)[0][:, :count]
        if previous is not None and previous.any():
            left, _, right = np.linalg.svd(p[:, :count].T @ previous[:, :count].astype(np.float64))
            p[:, :count] = p[:, :count] @ (left @ right)
        return p.astype(gradient.dtype)
