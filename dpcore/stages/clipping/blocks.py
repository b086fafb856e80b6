"""Blocks: the sources of the clip stage, one for each tensor.

A block stands for one vector of each example. The clip stage asks for the vectors' norms and for their weighted sum,
and never for the vectors. So clip rules, groups, adaptive norms, users, the audit and the mechanism do not know which
kind a block is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import numpy as np

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.check_rows import check_rows
from dpcore.spec.ops import Backend
from dpcore.stages.clipping.pairs import Embedding, Linear
from dpcore.stages.clipping.rows import Rows

__all__ = [
    "Block",
    "Embedding",
    "Linear",
    "Rows",
    "Tied",
    "as_block",
    "as_blocks",
    "combined",
    "joined",
    "of_units",
    "scaled",
]


class Block(Protocol):
    """One vector v_i for each example i: its gradient of one tensor.

    Notes
    -----
    What is promised to the clip: `add_sum` adds an integer vector k_i that is a function of example i's own arrays and
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
        """Name of the arrays' dtype."""

    @property
    def rounding(self) -> float:
        """How far rounding moves what an example adds, in steps of the grid: `dpcore.spec.contributions`."""

    def norms(self, backend: Backend[Any], scale: Any = None) -> Any:
        """Return N_i of the vectors times `scale` (d,), coordinate by coordinate: (B,) float64.

        Not finite where the vector is not; at least the true norm otherwise.
        """

    def add_sum(self, backend: Backend[Any], weights: Any, out: Any, scale: Any = None) -> None:
        """Add each ``weights[i] v_i`` times `scale`, as integers, to `out` (d,) of float64; a weight of 0 adds 0."""

    def rows(self) -> Any:
        """Return the vectors, (B, d): what remains where a kind has no formula."""

    def weighted(self, weight: float) -> Block:
        """Return the block of `weight` times the vectors."""

    def units(self, size: int) -> Block:
        """Return the sums of each `size` neighboring examples, which belong to one unit."""

    def map(self, function: Callable[[Any], Any]) -> Block:
        """Return the block with `function` applied to every array, those of indices too."""


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


def of_units(backend: Backend[Any], blocks: Sequence[Block], sizes: Sequence[int]) -> Iterator[list[Block]]:
    """Yield the sums of each unit's examples, which are clipped where a user has several: units of one size at a time.

    No unit is padded to the size of another. The bounds of its norms, and so its factors, then depend on its own
    examples only: one large user must not move what all others add, be it by a rounding each.
    """
    counts = np.asarray(sizes, dtype=np.int64)
    unit_size = np.repeat(counts, counts)  # of each example
    for size in sorted(set(sizes)):
        same = blocks
        if len(set(sizes)) > 1:
            which = backend.from_numpy(np.flatnonzero(unit_size == size))
            same = [block.map(lambda array: array[which]) for block in blocks]  # noqa: B023
        yield [block.units(size) for block in same]


def combined(backend: Backend[Any], weights: Sequence[float], points: Iterable[Sequence[Any]]) -> list[Block]:
    """Return the weighted sum of the points' gradients, tensor by tensor: all rows by one operation a point.

    It is formed before it is clipped: its sensitivity is then one clip norm, whatever the weights. A point's gradients
    are asked for when those before it are summed.
    """
    total, factor = list[Block](), 1.0
    for weight, blocks in zip(weights, points, strict=True):
        own = [as_block(block) for block in blocks]
        if not total:
            total, factor = own, weight
            continue
        rows = [i for i, both in enumerate(zip(total, own, strict=True)) if all(isinstance(b, Rows) for b in both)]
        sums: dict[int, Block] = {}
        if rows:
            values = [total[i].rows() for i in rows], [own[i].rows() for i in rows]
            sums = dict(zip(rows, map(Rows, backend.combine(*values, (factor, weight))), strict=True))
        total = [
            sums[i] if i in sums else joined([first.weighted(factor), second.weighted(weight)])
            for i, (first, second) in enumerate(zip(total, own, strict=True))
        ]
        factor = 1.0
    return [block.weighted(factor) for block in total]


def joined(blocks: Iterable[Block]) -> Block:
    """Return the sum of blocks of one tensor: of its several uses, and of the points of a query.

    Pairs are put side by side, so that their sum is formed before any square is taken, and cross terms are in it. Rows
    are added from the first to the last; with rows among them, and with one tensor read in two shapes, all become rows.
    """
    return reduce(_sum, blocks)


def _sum(first: Block, second: Block) -> Block:
    paired = (Linear, Embedding, Tied)
    if not isinstance(first, paired) or not isinstance(second, paired) or first.shape != second.shape:
        with np.errstate(all="ignore"):  # a warning of an overflow would tell of one example
            return Rows(first.rows() + second.rows())
    tables = [block.embedding if isinstance(block, Tied) else block for block in (first, second)]
    heads = [block.linear if isinstance(block, Tied) else block for block in (first, second)]
    table = _side_by_side([block for block in tables if isinstance(block, Embedding)])
    head = _side_by_side([block for block in heads if isinstance(block, Linear)])
    both: Block = Tied(table, head) if table and head else table or head
    return both


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

    @property
    def rounding(self) -> float:
        """See `Block.rounding`: each part is rounded by itself."""
        return self.embedding.rounding + self.linear.rounding

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
        self.embedding.add_sum(backend, weights, out)
        # As the norms were taken: they bound this sum, not that of the layer alone.
        backend.linear_sums([self.linear.layer._replace(exact=self.exact)], [weights], [out])

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
