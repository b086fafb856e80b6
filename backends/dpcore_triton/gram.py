"""Norms of an example's terms, and their inner products: what the size of their sum follows from."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from dpcore_triton.launch import jit, kernel
from dpcore_triton.layers import Layers, layer_at, located, sizes_of
from dpcore_triton.pairs import DEPTH, POSITIONS, dot, rows_at, weights_at
from dpcore_triton.row_norms import RAISING, SQUARED_COLUMNS, SQUARED_ROWS, squares_of


def fill_lengths(layers: Layers, lengths: torch.Tensor, chosen: Sequence[bool]) -> None:
    """Put the norm of each term, |weight| |e_t| |a_t|, to its place: (B, T) of the chosen layers.

    Squares are added as in `row_norms`: each of two norms is raised, and so no less than that of its row.
    """
    units = [row.total if own else 0 for row, own in zip(layers.rows, chosen, strict=True)]
    copies, own = -(-layers.parts.examples // SQUARED_ROWS), [(0, 0)] * len(units)
    meta = {"ROWS": SQUARED_ROWS, "COLUMNS": SQUARED_COLUMNS, "warps": 1}
    layers.start(_lengths_kernel, units, copies, own, lengths, layers.parts.examples, **meta)


def fill_gram(layers: Layers, squares: torch.Tensor, units: Sequence[int], places: Sequence[int]) -> None:
    """Put sums of ``(a_s . a_t)(e_s . e_t)`` that add up to |v|^2 to their places: (B, `blocks_of`), or 0 units."""
    examples, own = layers.parts.examples, [(place, 0) for place in places]
    layers.start(_gram_kernel, units, examples, own, squares, examples, POSITIONS=POSITIONS, DEPTH=DEPTH)


def blocks_of(total: int) -> int:
    """Return how many blocks so many positions are."""
    return -(-total // POSITIONS)


def signed_roundings(p: int, q: int, total: int) -> int:
    """Return how often a term of `fill_gram` is rounded: in inner products, in its block, over blocks, in factors."""
    return p + q + POSITIONS * POSITIONS + 2 * blocks_of(total) + 16


@kernel("examples")
def _lengths_kernel(
    rows, row_of, layers, layer_of, lengths, examples,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: ARG001
):  # fmt: skip
    groups = (examples + ROWS - 1) // ROWS
    unit = tl.program_id(0) // groups
    layer = layer_at(unit, layers, layer_of)
    p, q, first, end = sizes_of(layer)
    time = unit - tl.load(layer)
    example = (tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask, position = example < examples, first + time + example * 0
    square = squares_at(rows_at(rows, row_of, example, position, mask, 1, KIND), mask, p, ROWS, COLUMNS)
    other = squares_at(rows_at(rows, row_of, example, position, mask, 4, KIND), mask, q, ROWS, COLUMNS)
    weight = tl.abs(weights_at(rows, row_of, position, mask))
    at = lengths + (tl.load(layer + 4) * examples + example * (end - first) + time)
    tl.store(at, weight * (tl.sqrt(square) * RAISING * (tl.sqrt(other) * RAISING)), mask=mask)


@jit
def squares_at(at, mask, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of squares of each row: see `squares_of`."""
    sums, start = tl.zeros((ROWS,), tl.float64), 0
    while start < width:
        column = start + tl.arange(0, COLUMNS)
        inside = mask[:, None] & (column < width)[None, :]
        values = tl.load(at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        sums += squares_of(values, ROWS, COLUMNS)
        start += COLUMNS
    return sums


@kernel("examples")
def _gram_kernel(
    rows, row_of, layers, layer_of, squares, examples, POSITIONS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    layer, within = located(layers, layer_of, examples)
    p, q, begin, end = sizes_of(layer)
    blocks = (end - begin + POSITIONS - 1) // POSITIONS
    example, start = within // blocks, begin + within % blocks * POSITIONS
    first = start + tl.arange(0, POSITIONS)
    mask, other = first < end, start
    a, e = rows_at(rows, row_of, example, first, mask, 1), rows_at(rows, row_of, example, first, mask, 4)
    weight, one = weights_at(rows, row_of, first, mask), tl.full((POSITIONS,), 1.0, tl.float64)
    sums = tl.zeros((POSITIONS, POSITIONS), tl.float64)
    while other < end:
        second = other + tl.arange(0, POSITIONS)
        used = second < end
        b, f = rows_at(rows, row_of, example, second, used, 1), rows_at(rows, row_of, example, second, used, 4)
        factor = weights_at(rows, row_of, second, used)
        products = inner_products(a, one, mask, b, one, used, p, POSITIONS, DEPTH)
        products *= inner_products(e, weight, mask, f, factor, used, q, POSITIONS, DEPTH)
        # Blocks off the diagonal stand for two.
        sums += tl.where(other > start, 2.0, 1.0) * products
        other += POSITIONS
    tl.store(squares + (tl.load(layer + 6) * examples + within), tl.sum(tl.sum(sums, axis=1), axis=0))


@jit
def inner_products(at, weight, mask, to, factor, used, width, POSITIONS: tl.constexpr, DEPTH: tl.constexpr):
    """Return the inner products of the rows at `at`, times `weight`, and those at `to`, times `factor`."""
    sums, start = tl.zeros((POSITIONS, POSITIONS), tl.float64), 0
    while start < width:
        column = start + tl.arange(0, DEPTH)
        inside = column < width
        left = tl.load(at[:, None] + column[None, :], mask=mask[:, None] & inside[None, :], other=0.0).to(tl.float64)
        right = tl.load(to[None, :] + column[:, None], mask=inside[:, None] & used[None, :], other=0.0).to(tl.float64)
        sums = dot(left * weight[:, None], right * factor[None, :], sums)
        start += DEPTH
    return sums
