"""Pairs: blocks that hold what the examples' vectors are made of, a layer's inputs and its output gradients.

The vectors themselves are formed by `rows` only, where a kind has no formula. The arrays are NumPy's or torch's, and
nothing here needs to know which.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpcore.spec.check import dtype_name
from dpcore.spec.contributions import rounding_of_linear, rounding_of_rows
from dpcore.spec.ops import Backend
from dpcore.spec.pair_ops import LinearPairs

Map = Callable[[Any], Any]


@dataclass(frozen=True)
class Linear:
    """A matrix (q, p) that inputs a were multiplied by: example i has ``sum_j w_j sum_t e_{j,t} a_{j,t}^T``.

    Attributes
    ----------
    inputs : tuple of J arrays (B, T_j, p)
        a: one part for each use of the matrix and each point of the query.
    gradients : tuple of J arrays (B, T_j, q)
        e: of the loss by the outputs.
    point_weights : tuple of J floats
    gram : bool
        Take norms by inner products of rows, which is cheaper for few rows and large matrices.
    """

    inputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    point_weights: tuple[float, ...]
    gram: bool = False

    @property
    def examples(self) -> int:
        """B."""
        return int(self.inputs[0].shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """(q, p)."""
        return int(self.gradients[0].shape[2]), int(self.inputs[0].shape[2])

    @property
    def dtype(self) -> str:
        """Name of the gradients' dtype."""
        return dtype_name(self.gradients[0])

    @property
    def exact(self) -> bool:
        """Whether points are subtracted: what is left may be far smaller than float32's rounding of each."""
        return min(self.point_weights) < 0 < max(self.point_weights)

    @property
    def layer(self) -> LinearPairs[Any]:
        """What the port takes."""
        return LinearPairs(self.inputs, self.gradients, self.point_weights, self.gram, self.exact)

    @property
    def rounding(self) -> float:
        """See `Block.rounding`."""
        q, p = self.shape
        return rounding_of_linear(q, p, sum(int(part.shape[1]) for part in self.inputs))

    def norms(self, backend: Backend[Any], scale: Any = None) -> Any:
        """See `Block.norms`."""
        return backend.linear_norms([self.layer], [scale])[0]

    def add_sum(self, backend: Backend[Any], weights: Any, out: Any, scale: Any = None) -> None:
        """See `Block.add_sum`."""
        backend.linear_sums([self.layer], [weights], [out], [scale])

    @np.errstate(all="ignore")  # a warning of an overflow would tell of one example
    def rows(self) -> Any:
        """See `Block.rows`."""
        parts = zip(self.inputs, self.gradients, self.point_weights, strict=True)
        tiles = [w * (e.swapaxes(1, 2) @ a) for a, e, w in parts]
        return sum(tiles[1:], tiles[0]).reshape(self.examples, math.prod(self.shape))

    def weighted(self, weight: float) -> Linear:
        """See `Block.weighted`."""
        return self if weight == 1 else replace(self, point_weights=tuple(weight * w for w in self.point_weights))

    def units(self, size: int) -> Linear:
        """See `Block.units`."""
        return self.map(lambda array: _of_units(array, size))

    def beside(self, other: Linear) -> Linear:
        """Return the sum with another block of this matrix."""
        weights = self.point_weights + other.point_weights
        gram = self.gram and other.gram
        return Linear(self.inputs + other.inputs, self.gradients + other.gradients, weights, gram)

    def map(self, function: Map) -> Linear:
        """See `Block.map`."""
        return replace(self, inputs=tuple(map(function, self.inputs)), gradients=tuple(map(function, self.gradients)))


@dataclass(frozen=True)
class Embedding:
    """A table (size, q) of which rows were taken: row r of example i has ``sum_j w_j`` of its e_{j,t} at index r.

    Attributes
    ----------
    indices : tuple of J arrays (B, T_j) of int64
        Which row was taken; a negative one adds nothing.
    gradients : tuple of J arrays (B, T_j, q)
    point_weights : tuple of J floats
    size : int
        Rows of the table.
    """

    indices: tuple[Any, ...]
    gradients: tuple[Any, ...]
    point_weights: tuple[float, ...]
    size: int

    @property
    def examples(self) -> int:
        """B."""
        return int(self.indices[0].shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """(size, q)."""
        return self.size, int(self.gradients[0].shape[2])

    @property
    def dtype(self) -> str:
        """Name of the gradients' dtype."""
        return dtype_name(self.gradients[0])

    @property
    def rounding(self) -> float:
        """See `Block.rounding`."""
        return rounding_of_rows(math.prod(self.shape))

    def norms(self, backend: Backend[Any], scale: Any = None) -> Any:
        """See `Block.norms`."""
        return backend.embedding_norms(self.indices, self.gradients, self.point_weights, self.size, scale=scale)

    def add_sum(self, backend: Backend[Any], weights: Any, out: Any, scale: Any = None) -> None:
        """See `Block.add_sum`."""
        backend.embedding_sum(self.indices, self.gradients, self.point_weights, weights, out, scale=scale)

    @np.errstate(all="ignore")  # a warning of an overflow would tell of one example
    def rows(self) -> Any:
        """See `Block.rows`."""
        first = self.gradients[0]
        shape = self.examples, *self.shape
        rows = np.zeros(shape, first.dtype) if isinstance(first, np.ndarray) else first.new_zeros(shape)
        for indices, gradients, weight in zip(self.indices, self.gradients, self.point_weights, strict=True):
            for row, index, gradient in zip(rows, indices, gradients, strict=True):
                kept = index >= 0
                if isinstance(row, np.ndarray):
                    np.add.at(row, index[kept], weight * gradient[kept])
                else:  # without a look at values, for which a device would wait
                    row.index_add_(0, index.clamp(min=0), (weight * gradient).masked_fill(~kept[:, None], 0.0))
        return rows.reshape(self.examples, math.prod(self.shape))

    def weighted(self, weight: float) -> Embedding:
        """See `Block.weighted`."""
        return self if weight == 1 else replace(self, point_weights=tuple(weight * w for w in self.point_weights))

    def units(self, size: int) -> Embedding:
        """See `Block.units`."""
        return self.map(lambda array: _of_units(array, size))

    def beside(self, other: Embedding) -> Embedding:
        """Return the sum with another block of this table."""
        weights = self.point_weights + other.point_weights
        return Embedding(self.indices + other.indices, self.gradients + other.gradients, weights, self.size)

    def map(self, function: Map) -> Embedding:
        """See `Block.map`."""
        return replace(self, indices=tuple(map(function, self.indices)), gradients=tuple(map(function, self.gradients)))


def _of_units(array: Any, size: int) -> Any:
    """Put the rows (B, T, ...) of each `size` neighbors one after the other: (B / size, size T, ...)."""
    examples, time, *rest = array.shape
    return array.reshape(examples // size, size * time, *rest)
