"""Norms of an example's terms, and their inner products: what the size of their sum follows from."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton.language as tl

from dpcore_triton.launch import ROWS, jit, kernel, launch
from dpcore_triton.pairs import DEPTH, POSITIONS, WIDTH, Parts, dot, rows_at, weights_at


def lengths_of(parts: Parts, p: int, q: int) -> torch.Tensor:
    """Return the norm of each term of each example, |weight| |e_t| |a_t|: (B, T)."""
    lengths = parts.empty(parts.total)
    count = lengths.numel()
    launch(
        _lengths_kernel, (-(-count // ROWS),), parts.device, parts.rows, parts.row_of, lengths, count, p, q,
        parts.total, ROWS=ROWS, COLUMNS=WIDTH,
    )  # fmt: skip
    return lengths


def gram_of(parts: Parts, p: int, q: int) -> torch.Tensor:
    """Return sums of ``(a_s . a_t)(e_s . e_t)`` that add up to each example's |v|^2: (B, blocks of positions)."""
    blocks = -(-parts.total // POSITIONS)
    squares = parts.empty(blocks)
    launch(
        _gram_kernel, (parts.examples * blocks,), parts.device, parts.rows, parts.row_of, squares, p, q, parts.total,
        POSITIONS=POSITIONS, DEPTH=DEPTH,
    )  # fmt: skip
    return squares


def signed_roundings(parts: Parts, p: int, q: int) -> int:
    """Return how often a term of `gram_of` is rounded: in inner products, in its block, over blocks, in factors."""
    return p + q + POSITIONS * POSITIONS + 2 * -(-parts.total // POSITIONS) + 16


@kernel("count", "p", "q", "total")
def _lengths_kernel(
    rows, row_of, lengths, count, p, q, total, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    term = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask, example, position = term < count, term // total, term % total
    square = squares_of(rows_at(rows, row_of, example, position, mask, 1), mask, p, ROWS, COLUMNS)
    other = squares_of(rows_at(rows, row_of, example, position, mask, 4), mask, q, ROWS, COLUMNS)
    weight = tl.abs(weights_at(rows, row_of, position, mask))
    tl.store(lengths + term, weight * (tl.sqrt(square) * tl.sqrt(other)), mask=mask)


@jit
def squares_of(at, mask, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of squares of each row."""
    sums, start = tl.zeros((ROWS, COLUMNS), tl.float64), 0
    while start < width:
        column = start + tl.arange(0, COLUMNS)
        inside = mask[:, None] & (column < width)[None, :]
        values = tl.load(at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float64)
        sums += values * values
        start += COLUMNS
    return tl.sum(sums, axis=1)


@kernel("p", "q", "total")
def _gram_kernel(rows, row_of, squares, p, q, total, POSITIONS: tl.constexpr, DEPTH: tl.constexpr):
    blocks = (total + POSITIONS - 1) // POSITIONS
    example, start = tl.program_id(0) // blocks, tl.program_id(0) % blocks * POSITIONS
    first = start + tl.arange(0, POSITIONS)
    mask, other = first < total, start
    a, e = rows_at(rows, row_of, example, first, mask, 1), rows_at(rows, row_of, example, first, mask, 4)
    weight, one = weights_at(rows, row_of, first, mask), tl.full((POSITIONS,), 1.0, tl.float64)
    sums = tl.zeros((POSITIONS, POSITIONS), tl.float64)
    while other < total:
        second = other + tl.arange(0, POSITIONS)
        used = second < total
        b, f = rows_at(rows, row_of, example, second, used, 1), rows_at(rows, row_of, example, second, used, 4)
        factor = weights_at(rows, row_of, second, used)
        products = inner_products(a, one, mask, b, one, used, p, POSITIONS, DEPTH)
        products *= inner_products(e, weight, mask, f, factor, used, q, POSITIONS, DEPTH)
        # Blocks off the diagonal stand for two.
        sums += tl.where(other > start, 2.0, 1.0) * products
        other += POSITIONS
    tl.store(squares + tl.program_id(0), tl.sum(tl.sum(sums, axis=1), axis=0))


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
