"""Strategies with every entry of the triangle: rows of Z are drawn again at each step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from dpcore.spec import validate
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
        C up to its scale. As an attribute: float64, read-only, scaled so that the largest column norm is 1; `sha256` is
        its digest, and two strategies are equal when theirs are.
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


# Noise of a binary tree (DP-FTRL's first mechanism) as a square, lower-triangular strategy.
#
# Steps count from 1 here. Node t of the naive tree covers (t - lowbit(t), t], lowbit(t) the largest power of two that
# divides t; row t of the 0/1 matrix C marks it. The prefix 1 .. t is the disjoint union of the nodes t, t - lowbit(t),
# and so on, one for each binary digit 1 of t: with D the 0/1 matrix of these nodes and A the matrix of prefix sums, A =
# D C. So the noise on the prefix sums is A C^{-1} Z = D Z, the sum of the noise of the prefix's own nodes. It is not
# normalized: noise on prefix t has popcount(t) times the variance of a node.
#
# Streaming. C^{-1} = A^{-1} D: N_t is the noise of prefix t less that of prefix t - 1. With lowbit(t) = 2^k the
# prefixes share the nodes up to t - 2^k; t - 1 = (t - 2^k) + 2^{k-1} + ... + 1 has k further nodes, namely
# t - 1, t - 2, t - 4, ..., t - 2^{k-1}, so that
#
#     N_t = Z_t - sum_{i<k} Z_{t - 2^i},        at most 1 + floor(log2 T) rows of Z, of which Z_t alone is new.
#
# An example of step t moves the nodes that cover t: t, t + lowbit(t), ..., at most 1 + floor(log2 T) of them (step 1),
# the squared norm of the largest column.


def nodes_touched(steps: int) -> int:
    """Return the most nodes that one step's sum enters, 1 + floor(log2(steps)), for steps >= 1."""
    return validate.integer(steps=steps, minimum=1).bit_length()


@dataclass(frozen=True)
class Tree(base.Redrawn, base.Settings):
    """The naive binary tree: prefix t carries the noise of the nodes of t's binary expansion.

    Each step draws up to 1 + floor(log2 T) rows of Z, 2 on average, and stores none.

    Parameters
    ----------
    steps : int
        T; the scale is 1/sqrt(1 + floor(log2 T)).
    """

    steps: int
    kind: ClassVar[str] = "tree"

    @property
    def node_scale(self) -> float:
        """Standard deviation of a node's noise over that of Z: the largest column norm of the 0/1 matrix."""
        return math.sqrt(nodes_touched(self.steps))

    def rows(self, step: int) -> tuple[tuple[int, float], ...]:
        """Return row `step` (from 0) of C^{-1}: see above."""
        t = base.check_row(step, self.steps) + 1
        older = [(t - 2**i - 1, -self.node_scale) for i in range((t & -t).bit_length() - 1)]
        return (*reversed(older), (step, self.node_scale))

    def columns(self, indices: Indices, steps: int) -> Matrix:
        """Return columns of the leading block, (steps, len(indices))."""
        result = np.zeros((base.check_block(steps, self.steps), len(indices)))
        for place, index in enumerate(indices):
            t = int(index) + 1
            while t <= steps:
                result[t - 1, place] = 1.0 / self.node_scale
                t += t & -t
        return result

    def inverse_row_norms(self, steps: int) -> Matrix:
        """Return the squared row norms of C^{-1}, (steps,): (1 + k) (1 + floor(log2 T)) with 2^k the lowbit."""
        t = np.arange(1, base.check_block(steps, self.steps) + 1)
        # The exponent of a power of two in [1/2, 1) 2^e is one more than its logarithm.
        return np.frexp((t & -t).astype(np.float64))[1] * float(nodes_touched(self.steps))


@dataclass(frozen=True)
class TreeOptimal(base.Settings, Redrawn):
    """The binary tree with the best linear estimate of each prefix from its nodes ("full Honaker").

    With N the 0/1 matrix of every complete node [j 2^k, (j+1) 2^k) of 0 .. T - 1, C is the lower-triangular L with
    L^T L = N^T N (reverse Cholesky), scaled. Equal products of columns mean equal sensitivity under every
    participation. N = Q L with Q^T Q = I, so the best estimate A (N^T N)^{-1} N^T z of the prefixes is
    A L^{-1} (Q^T z): the noise of the strategy L, exactly; and L can be streamed, where the estimate itself would wait
    for later nodes.

    Dense: N_t takes all of Z_0 .. Z_t, drawn again, and the matrix and its inverse take 16 T^2 bytes.

    Parameters
    ----------
    steps : int
        T.
    """

    steps: int
    kind: ClassVar[str] = "tree-optimal"

    @cached_property
    def entries(self) -> Matrix:  # type: ignore[override]
        """C, (T, T)."""
        # J X J turns rows and columns around: with J N^T N J = R R^T, R lower-triangular, L = J R^T J.
        reverse = np.linalg.cholesky(_node_gram(self.steps)[::-1, ::-1])
        return Dense(np.tril(reverse.T[::-1, ::-1])).entries


def _node_gram(steps: int) -> Matrix:
    """Return N^T N, (steps, steps): the number of complete nodes that hold both steps."""
    result = np.zeros((steps, steps))
    for k in range(steps.bit_length()):
        size = 2**k
        for first in range(0, steps - size + 1, size):
            result[first : first + size, first : first + size] += 1.0
    return result
