"""Blocks: the sources of the clip stage, one for each tensor.

A block represents one vector of each example. The clip stage takes the vectors' norms and their weighted sum, and never
the vectors. So clip rules, groups, adaptive norms, users, the audit and the mechanism do not depend on a block's kind.
Arrays are NumPy's or torch's; nothing here depends on which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add, attrgetter
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.check import read_as
from dpcore.spec.check_rows import check_rows
from dpcore.spec.contributions import CANCELLATION, rounding_of_linear, rounding_of_rows
from dpcore.spec.ops import Backend
from dpcore.spec.pair_ops import LinearPairs

__all__ = [
    "Block", "Chunked", "Embedding", "Linear", "Rows", "Tied", "as_block", "as_blocks", "combined", "joined",
    "of_units", "scaled",
]  # fmt: skip


class Block(Protocol):
    """One vector v_i for each example i: its gradient of one tensor.

    Notes
    -----
    The guarantee for the clip: `add_sum` adds an integer vector k_i that is a function of example i's own arrays and
    weight, and `norms` returns N_i with ``||k_i|| <= w_i N_i + rounding``.
    """

    @property
    def examples(self) -> int:
        """Number B of examples."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example's vector, (d,) or (q, p) flattened row by row."""

    @property
    def dtype(self) -> str:
        """Name of the dtype that the arrays are computed in: of 16 bits float32."""

    @property
    def rounding(self) -> float:
        """How far rounding moves an example's addend, in steps of the grid: `dpcore.spec.contributions`."""

    def norms(self, backend: Backend[Any], scale: Any = None) -> Any:
        """Return N_i of the vectors times `scale` (d,), coordinate by coordinate: (B,) float64.

        Not finite if the vector is not; at least the true norm otherwise.
        """

    def add_sum(
        self, backend: Backend[Any], weights: Any, out: Any, scale: Any = None, longest: float | None = None
    ) -> None:
        """Add each ``weights[i] v_i`` times `scale`, as integers, to `out` (d,) of float64; a weight of 0 adds 0.

        No ``weights[i] N_i`` exceeds `longest`, if it is given.
        """

    def rows(self) -> Any:
        """Return the vectors, (B, d), for kinds without a formula."""

    def weighted(self, weight: float) -> Block:
        """Return the block of `weight` times the vectors."""

    def units(self, size: int) -> Block:
        """Return the sums of each `size` neighboring examples, which belong to one unit."""

    def map(self, function: Callable[[Any], Any]) -> Block:
        """Return the block with `function` applied to every array, those of indices too."""


# Rows: each example's vector itself.


_SHAPE = attrgetter("shape")


def _at_least_float32(array: Any) -> Any:
    """Return an array of 16 bits in float32: otherwise results would be rounded to 16 bits."""
    if array.dtype.itemsize != 2:
        return array
    return array.astype(np.float32) if isinstance(array, np.ndarray) else array.float()


@dataclass(frozen=True)
class Rows:
    """Each example's vector itself.

    Attributes
    ----------
    values : (B, d) array
    """

    values: Any

    @property
    def examples(self) -> int:
        """B."""
        return int(self.values.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """(d,)."""
        return tuple(self.values.shape[1:])

    @property
    def dtype(self) -> str:
        """See `Block.dtype`."""
        return read_as(self.values)

    @property
    def rounding(self) -> float:
        """See `Block.rounding`."""
        return rounding_of_rows(self.values.shape[1])

    def norms(self, backend: Backend[Any], scale: Any = None) -> Any:
        """See `Block.norms`."""
        return backend.row_norms([self.values], [scale])

    def add_sum(
        self, backend: Backend[Any], weights: Any, out: Any, scale: Any = None, longest: float | None = None
    ) -> None:
        """See `Block.add_sum`."""
        backend.weighted_sum([self.values], [weights], [out], [scale], None if longest is None else [longest])

    def rows(self) -> Any:
        """See `Block.rows`."""
        return self.values

    @np.errstate(all="ignore")  # a warning of an overflow would reveal one example
    def weighted(self, weight: float) -> Rows:
        """See `Block.weighted`."""
        return self if weight == 1 else Rows(weight * _at_least_float32(self.values))

    @np.errstate(all="ignore")
    def units(self, size: int) -> Rows:
        """See `Block.units`."""
        if size == 1:
            return self
        return Rows(_at_least_float32(self.values).reshape(self.examples // size, size, *self.shape).sum(1))

    def map(self, function: Callable[[Any], Any]) -> Rows:
        """See `Block.map`."""
        return Rows(function(self.values))


def as_rows(values: Sequence[Any], sizes: Sequence[int]) -> list[Any] | None:
    """Return arrays (B, d) of one B, with d of these sizes, as blocks: hundreds at every step, by one call for each.

    None if one is something else, which `as_blocks` checks.
    """
    try:
        shapes = list(map(_SHAPE, values))
        if any(hasattr(kind, "add_sum") for kind in set(map(type, values))):
            return None
        return list(map(Rows, values)) if shapes == [(shapes[0][0], size) for size in sizes] else None
    except (AttributeError, IndexError, TypeError):
        return None


# Pairs: a layer's inputs and its output gradients, which determine the examples' vectors. Only `rows` forms the vectors
# themselves, for kinds without a formula.


class _Pairs:
    """Base of both kinds: tuples of J arrays, one for each use of the tensor and each point of the query."""

    arrays: ClassVar[tuple[str, ...]]
    gradients: tuple[Any, ...]
    point_weights: tuple[float, ...]

    @property
    def examples(self) -> int:
        """B."""
        return int(self.gradients[0].shape[0])

    @property
    def dtype(self) -> str:
        """See `Block.dtype`."""
        return read_as(self.gradients[0])

    def weighted(self, weight: float) -> Self:
        """See `Block.weighted`."""
        return self if weight == 1 else self._with(point_weights=tuple(weight * w for w in self.point_weights))

    def units(self, size: int) -> Self:
        """See `Block.units`: the rows (B, T, ...) of each `size` neighbors one after the other."""
        return self.map(lambda array: array.reshape(len(array) // size, size * array.shape[1], *array.shape[2:]))

    def beside(self, other: Self) -> Self:
        """Return the sum with another block of this tensor."""
        return self._with(**{n: getattr(self, n) + getattr(other, n) for n in (*self.arrays, "point_weights")})

    def map(self, function: Callable[[Any], Any]) -> Self:
        """See `Block.map`."""
        return self._with(**{name: tuple(map(function, getattr(self, name))) for name in self.arrays})

    def _with(self, **changed: Any) -> Self:
        return replace(self, **changed)  # type: ignore[type-var]


def products(e: Any, a: Any) -> Any:
    """Return each example's ``sum_t e_t a_t^T``, (B, q, p): a product of its own, of arrays that lie alike in memory.

    One product for several examples may round each otherwise for another number of them.
    """
    shape = len(a), e.shape[2], a.shape[2]
    found = np.empty(shape, a.dtype) if isinstance(a, np.ndarray) else a.new_empty(shape)
    for own, y, x in zip(found, e, a, strict=True):
        own[...] = (y + 0).T @ (x + 0)
    return found


@dataclass(frozen=True)
class Linear(_Pairs):
    """A matrix (q, p) that inputs a were multiplied by: example i has ``sum_j w_j sum_t e_{j,t} a_{j,t}^T``.

    Attributes
    ----------
    inputs : tuple of J arrays (B, T_j, p)
        a.
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
    arrays: ClassVar[tuple[str, ...]] = ("inputs", "gradients")

    @property
    def shape(self) -> tuple[int, ...]:
        """(q, p)."""
        return int(self.gradients[0].shape[2]), int(self.inputs[0].shape[2])

    @property
    def exact(self) -> bool:
        """Whether points are subtracted: the difference may be far smaller than float32's rounding of each."""
        return min(self.point_weights) < 0 < max(self.point_weights)

    @property
    def layer(self) -> LinearPairs[Any]:
        """The layer for the port."""
        return LinearPairs(self.inputs, self.gradients, self.point_weights, self.gram, self.exact)

    @property
    def rounding(self) -> float:
        """See `Block.rounding`."""
        q, p = self.shape
        return rounding_of_linear(q, p, sum(int(part.shape[1]) for part in self.inputs))

    def norms(self, backend: Backend[Any], scale: Any = None) -> Any:
        """See `Block.norms`."""
        return backend.linear_norms([self.layer], [scale])[0]

    def add_sum(
        self, backend: Backend[Any], weights: Any, out: Any, scale: Any = None, longest: float | None = None
    ) -> None:
        """See `Block.add_sum`."""
        backend.linear_sums([self.layer], [weights], [out], [scale], self.bound(longest))

    def bound(self, longest: float | None) -> list[float] | None:
        """Return `longest` for the port, if it does not add the layer by coarser factors for it: those of one row."""
        return None if longest is None or sum(part.shape[1] for part in self.inputs) == 1 else [longest]

    @np.errstate(all="ignore")  # a warning of an overflow would reveal one example
    def rows(self) -> Any:
        """See `Block.rows`."""
        sides = (map(_at_least_float32, side) for side in (self.inputs, self.gradients))
        parts = zip(*sides, self.point_weights, strict=True)
        tiles = [w * products(e, a) for a, e, w in parts]
        return sum(tiles[1:], tiles[0]).reshape(self.examples, math.prod(self.shape))

    def beside(self, other: Linear) -> Linear:
        """Return the sum with another block of this matrix."""
        return replace(super().beside(other), gram=self.gram and other.gram)


@dataclass(frozen=True)
class Embedding(_Pairs):
    """A table (size, q) with rows looked up: row r of example i has ``sum_j w_j`` of its e_{j,t} at index r.

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
    arrays: ClassVar[tuple[str, ...]] = ("indices", "gradients")

    @property
    def shape(self) -> tuple[int, ...]:
        """(size, q)."""
        return self.size, int(self.gradients[0].shape[2])

    @property
    def rounding(self) -> float:
        """See `Block.rounding`."""
        return rounding_of_rows(math.prod(self.shape))

    def norms(self, backend: Backend[Any], scale: Any = None) -> Any:
        """See `Block.norms`."""
        return backend.embedding_norms(self.indices, self.gradients, self.point_weights, self.size, scale=scale)

    def add_sum(
        self, backend: Backend[Any], weights: Any, out: Any, scale: Any = None, longest: float | None = None
    ) -> None:
        """See `Block.add_sum`."""
        backend.embedding_sum(self.indices, self.gradients, self.point_weights, weights, out, scale=scale)

    @np.errstate(all="ignore")  # a warning of an overflow would reveal one example
    def rows(self) -> Any:
        """See `Block.rows`."""
        first = _at_least_float32(self.gradients[0][:0])
        shape = self.examples, *self.shape
        rows = np.zeros(shape, first.dtype) if isinstance(first, np.ndarray) else first.new_zeros(shape)
        for indices, gradients, weight in zip(self.indices, self.gradients, self.point_weights, strict=True):
            for row, index, gradient in zip(rows, indices, map(_at_least_float32, gradients), strict=True):
                kept = index >= 0
                if isinstance(row, np.ndarray):
                    np.add.at(row, index[kept], weight * gradient[kept])
                    continue
                # Without a look at values, for which a device would wait.
                index, added = index.clamp(min=0), (weight * gradient).masked_fill(~kept[:, None], 0.0)
                if row.is_cpu:
                    row.index_add_(0, index, added)
                else:  # this sorts; a device's index_add_ would round otherwise each time, and not as it was measured
                    row.index_put_((index,), added, accumulate=True)
        return rows.reshape(self.examples, math.prod(self.shape))


# All kinds.

# A table with this many times as many rows as an example has tokens stays a table when it is added to rows.
_LARGE = 8


def as_block(values: Any) -> Block:
    """Return a block as it is, and an array (B, d) as rows."""
    block: Block = values if hasattr(values, "add_sum") else Rows(values)
    return block


def as_blocks(values: Sequence[Any], sizes: Sequence[int]) -> list[Block]:
    """Return blocks of one B and one dtype, with `sizes` coordinates; refuse others before anything is summed."""
    blocks = [as_block(each) for each in values]
    for block in blocks:
        if isinstance(block, Rows) and len(getattr(block.values, "shape", ())) != 2:
            check_rows([block.values], None)
    examples, dtype = blocks[0].examples, blocks[0].dtype
    for i, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        if math.prod(block.shape) != size:
            raise ArgumentError(f"blocks[{i}].shape={tuple(block.shape)}: must have {size} coordinates, as the tensor")
        if block.examples != examples:
            raise ArgumentError(f"blocks[{i}].examples={block.examples}: must be {examples}, as of the first")
        if not isinstance(block, Rows) and block.dtype != dtype:
            raise ArgumentTypeError(f"blocks[{i}].dtype={block.dtype}: must be {dtype}, as of the first")
    return blocks


def of_units(blocks: Sequence[Block], sizes: Sequence[int]) -> Iterator[list[Block]]:
    """Yield the sums of each unit's examples, which are clipped if a user has several: units of one size at a time.

    No unit is padded to the size of another. The bounds of its norms, and so its factors, then depend only on its own
    examples: one large user must not move the addends of all others, not even by a rounding each.
    """
    counts = np.asarray(sizes, dtype=np.int64)
    unit_size = np.repeat(counts, counts)  # of each example
    for size in sorted(set(sizes)):
        same = blocks
        if len(set(sizes)) > 1:
            which = np.flatnonzero(unit_size == size)  # on the host, so that arrays of any device can be indexed
            same = [block.map(lambda array: array[which]) for block in blocks]  # noqa: B023
        yield [block.units(size) for block in same]


def combined(backend: Backend[Any], weights: Sequence[float], points: Iterable[Sequence[Any]]) -> list[Block]:
    """Return the weighted sum of the points' gradients, tensor by tensor: all rows by one operation a point.

    It is formed before it is clipped: its sensitivity is then one clip norm, whatever the weights. A point's gradients
    are computed when those before it are summed.
    """
    total, factor = list[Block](), 1.0
    for weight, blocks in zip(weights, points, strict=True):
        own = [as_block(block) for block in blocks]
        if not total:
            total, factor = own, weight
            continue
        both = [(uses(first), uses(second)) for first, second in zip(total, own, strict=True)]
        rows = [i for i, pair in enumerate(both) if all(isinstance(use[-1], Rows) for use in pair)]
        sums = dict[int, Block]()
        if rows:
            values = [both[i][0][-1].values for i in rows], [both[i][1][-1].values for i in rows]
            sums = dict(zip(rows, map(Rows, backend.combine(*values, (factor, weight))), strict=True))
        for i, (first, second) in enumerate(both):
            end = -1 if i in sums else None
            weighted = [use.weighted(factor) for use in first[:end]] + [use.weighted(weight) for use in second[:end]]
            total[i] = joined([*weighted, sums[i]] if i in sums else weighted)
        factor = 1.0
    return [block.weighted(factor) for block in total]


def joined(blocks: Iterable[Block]) -> Block:
    """Return the sum of blocks of one tensor: of its several uses, and of the points of a query.

    Pairs are put side by side, so that their sum is formed before any square is taken, and cross terms are in it. Rows
    are added from the first to the last. If some are rows, or one tensor is read in two shapes, all become rows, but
    for a table that is large.
    """
    return reduce(_sum, blocks)


def _sum(first: Block, second: Block) -> Block:
    if isinstance(first, Chunked) or isinstance(second, Chunked):
        parts = [block.parts if isinstance(block, Chunked) else (block,) for block in (first, second)]
        return Chunked(parts[0] + parts[1], first.shape if isinstance(first, Chunked) else second.shape)
    own = [*uses(first), *uses(second)]
    tables, heads = ([use for use in own if isinstance(use, Embedding) is kind] for kind in (True, False))
    paired = all(isinstance(use, Linear) for use in heads)
    if len({use.shape for use in own if not isinstance(use, Rows)}) > 1 or not (paired or _is_large(tables)):
        return _formed([first, second])
    if not paired:
        heads = [_formed(heads)]
    table, head = _side_by_side(tables), _side_by_side(heads)
    both: Block = Tied(table, head) if table and head else table or head
    return both


def uses(block: Block) -> tuple[Any, ...]:
    """Return the parts of a tied matrix, and any other block alone."""
    return (block.embedding, block.linear) if isinstance(block, Tied) else (block,)


@np.errstate(all="ignore")  # a warning of an overflow would reveal one example
def _formed(blocks: Sequence[Block]) -> Block:
    """Return the sum of blocks as rows; one alone in its own dtype."""
    return Rows(reduce(add, (_at_least_float32(block.rows()) for block in blocks)) if blocks[1:] else blocks[0].rows())


def _is_large(tables: Sequence[Any]) -> bool:
    """Return whether a table has many times as many rows as an example has tokens."""
    lengths = [int(index.shape[1]) for table in tables for index in table.indices]
    return bool(tables) and tables[0].size >= _LARGE * max(lengths)


def _side_by_side(blocks: list[Any]) -> Any:
    return blocks[0].beside(blocks[1]) if len(blocks) == 2 else blocks[0] if blocks else None


def scaled(blocks: Sequence[Block]) -> list[Block]:
    """Return blocks that all take a scale: a matrix that is both a table and a layer's has no formula with one."""
    return [Rows(block.rows()) if isinstance(block, Tied) else block for block in blocks]


@dataclass(frozen=True)
class Tied:
    """One matrix (V, p) that is a table and a layer's weight: the sum of both.

    Attributes
    ----------
    embedding : Embedding
    linear : Linear or Rows
        Rows if the layer's part is formed.
    """

    embedding: Embedding
    linear: Linear | Rows

    @property
    def examples(self) -> int:
        """B."""
        return self.linear.examples

    @property
    def shape(self) -> tuple[int, ...]:
        """(V, p)."""
        return self.embedding.shape

    @property
    def dtype(self) -> str:
        """See `Block.dtype`."""
        return self.linear.dtype

    @property
    def exact(self) -> bool:
        """Whether points are subtracted, of the table or of the layer or one of the other."""
        weights: tuple[float, ...] = sum(
            (use.point_weights for use in uses(self) if not isinstance(use, Rows)), start=()
        )
        return min(weights) < 0 < max(weights)

    @property
    def rounding(self) -> float:
        """See `Block.rounding`: each part is rounded by itself."""
        return self.embedding.rounding + self.linear.rounding

    def norms(self, backend: Backend[Any], scale: Any = None) -> Any:
        """See `Block.norms`."""
        if scale is not None:
            return Rows(self.rows()).norms(backend, scale)
        table, head = self.embedding, self.linear
        tokens = table.indices, table.gradients, table.point_weights
        if isinstance(head, Rows):
            return backend.tied_row_norms(*tokens, head.values, table.size)
        pairs = head.inputs, head.gradients, head.point_weights
        return backend.tied_norms(*tokens, *pairs, table.size, exact=self.exact)

    def add_sum(
        self, backend: Backend[Any], weights: Any, out: Any, scale: Any = None, longest: float | None = None
    ) -> None:
        """See `Block.add_sum`."""
        if scale is not None:
            Rows(self.rows()).add_sum(backend, weights, out, scale, longest)
            return
        if longest is not None:  # the norm is that of both parts together, of which each may be longer
            longest /= CANCELLATION
        self.embedding.add_sum(backend, weights, out)
        if isinstance(self.linear, Rows):
            self.linear.add_sum(backend, weights, out, None, longest)
            return
        # As precise as the norms: they bound this sum, not that of the layer alone.
        layer, bound = self.linear.layer._replace(exact=self.exact), self.linear.bound(longest)
        backend.linear_sums([layer], [weights], [out], None, bound)

    @np.errstate(all="ignore")  # a warning of an overflow would reveal one example
    def rows(self) -> Any:
        """See `Block.rows`."""
        return self.embedding.rows() + _at_least_float32(self.linear.rows())

    def weighted(self, weight: float) -> Tied:
        """See `Block.weighted`."""
        return Tied(self.embedding.weighted(weight), self.linear.weighted(weight))

    def units(self, size: int) -> Tied:
        """See `Block.units`."""
        return Tied(self.embedding.units(size), self.linear.units(size))

    def map(self, function: Callable[[Any], Any]) -> Tied:
        """See `Block.map`."""
        return Tied(self.embedding.map(function), self.linear.map(function))


CHUNK = 4096
"""Rows of a `Chunked` matrix at a time: the same for all, so that no example decides how another one's are cut."""


class Part(Protocol):
    """A part of `Chunked` that makes its blocks when they are needed."""

    @property
    def examples(self) -> int:
        """B."""

    @property
    def dtype(self) -> str:
        """Name of the arrays' dtype."""

    @property
    def rounding(self) -> float:
        """See `Block.rounding`: of all rows."""

    def chunk(self, first: int, last: int) -> Block:
        """Return the block of these rows of the matrix."""

    def weighted(self, weight: float) -> Part:
        """See `Block.weighted`."""

    def units(self, size: int) -> Part:
        """See `Block.units`."""

    def map(self, function: Callable[[Any], Any]) -> Part:
        """See `Block.map`; whatever is not per example stays."""


@dataclass(frozen=True)
class Chunked:
    """A matrix (q, p), a sum of parts, some made `CHUNK` rows at a time, for the norm and for the sum.

    Attributes
    ----------
    parts : tuple of Part or Block
    shape : (q, p)
    kept : list of (B,) arrays
        The chunks' norms, from `norms` on.

    Notes
    -----
    The chunks are tensors of their own, side by side. With ``||k_c|| <= w N_c + r_c`` for each of them, Minkowski's
    inequality gives ``||k|| <= w sqrt(sum_c N_c^2) + sqrt(sum_c r_c^2)``. A chunk of m rows has sqrt(m / q) of the
    rounding that all q rows have, whichever formula of `dpcore.spec.contributions` it is.

    A chunk is made twice, and a library's product may have other bits the second time. So the sum measures what it
    adds: if a chunk of an example is longer than N_c, it adds 0.
    """

    parts: tuple[Any, ...]
    shape: tuple[int, ...]
    kept: list[Any] = field(default_factory=list, compare=False)

    @property
    def examples(self) -> int:
        """B."""
        return int(self.parts[0].examples)

    @property
    def dtype(self) -> str:
        """Name of the arrays' dtype."""
        return str(self.parts[0].dtype)

    @property
    def rounding(self) -> float:
        """See `Block.rounding`: at most what all parts together have."""
        return math.fsum(part.rounding for part in self.parts)

    def pieces(self, scale: Any = None) -> Iterator[tuple[Block, slice, Any]]:
        """Yield the chunks' blocks, with each one's place in the flat matrix and its part of the scale."""
        rows, width = self.shape
        for first in range(0, rows, CHUNK):
            last = min(first + CHUNK, rows)
            place = slice(first * width, last * width)
            own = joined(_rows_of(part, first, last, width) for part in self.parts)
            if scale is None:
                yield own, place, None
            else:  # rows are formed once: what is measured is what is added
                yield scaled([own])[0], place, scale[place]

    def norms(self, backend: Backend[Any], scale: Any = None) -> Any:
        """See `Block.norms`."""
        self.kept[:] = [piece.norms(backend, own) for piece, _, own in self.pieces(scale)]
        return backend.joined_norms([self.kept])[0]

    def add_sum(
        self, backend: Backend[Any], weights: Any, out: Any, scale: Any = None, longest: float | None = None
    ) -> None:
        """See `Block.add_sum`; after `norms`, whose promise it keeps."""
        for (piece, place, own), norms in zip(self.pieces(scale), self.kept, strict=True):
            again = piece.norms(backend, own)
            piece.add_sum(backend, weights * (again <= norms), out[place], own, longest)

    @np.errstate(all="ignore")  # a warning of an overflow would reveal one example
    def rows(self) -> Any:
        """See `Block.rows`."""
        result: Any = None
        for piece, place, _ in self.pieces():
            own, shape = piece.rows(), (self.examples, math.prod(self.shape))
            if result is None:
                result = np.empty(shape, own.dtype) if isinstance(own, np.ndarray) else own.new_empty(shape)
            result[:, place] = own
        return result

    def weighted(self, weight: float) -> Chunked:
        """See `Block.weighted`."""
        return self._with(lambda part: part.weighted(weight))

    def units(self, size: int) -> Chunked:
        """See `Block.units`."""
        return self._with(lambda part: part.units(size))

    def map(self, function: Callable[[Any], Any]) -> Chunked:
        """See `Block.map`."""
        return self._with(lambda part: part.map(function))

    def _with(self, changed: Callable[[Any], Any]) -> Chunked:
        return Chunked(tuple(map(changed, self.parts)), self.shape)


def _rows_of(part: Any, first: int, last: int, width: int) -> Block:
    """Return the block of some rows of a matrix."""
    if isinstance(part, Rows):
        return Rows(part.values[:, first * width : last * width])
    if isinstance(part, Linear):
        return replace(part, gradients=tuple(e[:, :, first:last] for e in part.gradients))
    if isinstance(part, Embedding):
        inside = (((index >= first) & (index < last), index - first + 1) for index in part.indices)
        return replace(part, indices=tuple(own * place - 1 for own, place in inside), size=last - first)
    if isinstance(part, Tied):
        return Tied(*(_rows_of(each, first, last, width) for each in (part.embedding, part.linear)))  # type: ignore[arg-type]
    made: Block = part.chunk(first, last)
    return made
