"""Noise of a binary tree (DP-FTRL's first mechanism) as a square, lower-triangular strategy.

Steps count from 1 here. Node t of the naive tree covers (t - lowbit(t), t], lowbit(t) the largest power of two that
divides t; row t of the 0/1 matrix C marks it. The prefix 1 .. t is the disjoint union of the nodes t, t - lowbit(t),
and so on, one for each binary digit 1 of t: with D the 0/1 matrix of these nodes and A the matrix of prefix sums,
A = D C. So the noise on the prefix sums is A C^{-1} Z = D Z, the sum of the noise of the prefix's own nodes. It is not
normalized: noise on prefix t has popcount(t) times the variance of a node.

Streaming. C^{-1} = A^{-1} D: N_t is the noise of prefix t less that of prefix t - 1. With lowbit(t) = 2^k the prefixes
share the nodes up to t - 2^k; t - 1 = (t - 2^k) + 2^{k-1} + ... + 1 has the k further nodes t - 1, t - 2, t - 4, ...,
t - 2^{k-1}. Hence

    N_t = Z_t - sum_{i<k} Z_{t - 2^i},        at most 1 + floor(log2 T) rows of Z, of which Z_t alone is new.

An example of step t moves the nodes that cover t: t, t + lowbit(t), ..., at most 1 + floor(log2 T) of them (step 1),
the squared norm of the largest column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from dpcore.spec import validate
from dpcore.stages.strategies import base
from dpcore.stages.strategies.base import Indices, Matrix
from dpcore.stages.strategies.dense import Dense, Redrawn


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
        """Return row `step` (from 0) of C^{-1}: see the module."""
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
