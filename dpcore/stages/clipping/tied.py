"""Tied matrices: blocks of a matrix that is a table and a layer's weight, as in language models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpcore.spec.ops import Backend
from dpcore.spec.rounding import TIED_EXAMPLES
from dpcore.stages.clipping.pairs import Embedding, Linear
from dpcore.stages.clipping.rows import Rows


@dataclass(frozen=True)
class Tied:
    """One matrix (V, p) that is a table and a layer's weight: the sum of both.

    Attributes
    ----------
    embedding : Embedding
    linear : Linear
    """

    embedding: Embedding
    linear: Linear

    @property
    def examples(self) -> int:
        """B."""
        return self.linear.examples

    @property
    def shape(self) -> tuple[int, ...]:
        """(V, p)."""
        return self.linear.shape

    @property
    def dtype(self) -> str:
        """Name of the gradients' dtype."""
        return self.linear.dtype

    @property
    def exact(self) -> bool:
        """Whether points are subtracted, of the table or of the layer or one of the other."""
        weights = self.embedding.point_weights + self.linear.point_weights
        return min(weights) < 0 < max(weights)

    def norms(self, backend: Backend[Any], scale: Any = None) -> Any:
        """See `Block.norms`."""
        if scale is not None:
            return Rows(self.rows()).norms(backend, scale)
        table, head = self.embedding, self.linear
        parts = table.indices, table.gradients, table.point_weights, head.inputs, head.gradients, head.point_weights
        return backend.tied_norms(*parts, table.size, exact=self.exact)

    def add_sum(self, backend: Backend[Any], weights: Any, out: Any, scale: Any = None) -> None:
        """See `Block.add_sum`."""
        if scale is not None:
            Rows(self.rows()).add_sum(backend, weights, out, scale)
            return
        # Few at a time: the two parts of an example may be far longer than their sum (`dpcore.spec.rounding`).
        for first in range(0, self.examples, TIED_EXAMPLES):
            some = slice(first, first + TIED_EXAMPLES)
            part = self.map(lambda array: array[some])  # noqa: B023
            part.embedding.add_sum(backend, weights[some], out)
            # As the norms were taken: they bound this sum, not that of the layer alone.
            head = part.linear.layer._replace(exact=self.exact)
            backend.linear_sums([head], [weights[some]], [out])

    @np.errstate(all="ignore")  # a warning of an overflow would tell of one example
    def rows(self) -> Any:
        """See `Block.rows`."""
        return self.embedding.rows() + self.linear.rows()

    def weighted(self, weight: float) -> Tied:
        """See `Block.weighted`."""
        return Tied(self.embedding.weighted(weight), self.linear.weighted(weight))

    def units(self, size: int) -> Tied:
        """See `Block.units`."""
        return Tied(self.embedding.units(size), self.linear.units(size))

    def map(self, function: Callable[[Any], Any]) -> Tied:
        """See `Block.map`."""
        return Tied(self.embedding.map(function), self.linear.map(function))
