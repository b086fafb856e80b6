"""Weight gradients of linear maps, as pairs of activations and output gradients: certified norms, weighted sums."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from dpcore.spec.check_pairs import check_linear, check_sum
from dpcore_triton.gram import gram_of, lengths_of, signed_roundings
from dpcore_triton.launch import common_device, float32_only, jit, kernel, launch
from dpcore_triton.pairs import (
    DEPTH,
    POSITIONS,
    SIDE,
    UNIT,
    Bound,
    Parts,
    bound,
    dot,
    exponent_of,
    norms_of,
    parts_of,
    rows_at,
    weights_at,
)

Tensor = torch.Tensor

# Positions up to which inner products are cheaper than a tile, whose product takes DEPTH positions at least.
FEW_POSITIONS = 8


def linear_norms(
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    point_weights: Sequence[float],
    *,
    scale: Tensor | None = None,
    gram: bool = False,
    exact: bool = False,
) -> Tensor:
    """See `dpcore.spec.pair_ops.PairOperations.linear_norms`.

    Everything is float64 here: `exact` only keeps few positions from inner products, which are looser where terms
    cancel. An example's numbers meet no other's. No atomics: the result is the same every time.
    """
    check_linear(inputs, gradients, point_weights, scale)
    arrays = {"inputs": inputs, "gradients": gradients, "scale": () if scale is None else [scale]}
    float32_only(**arrays)
    device = common_device(**arrays)
    parts = parts_of(inputs, gradients, point_weights, device, exponent_of(point_weights))
    p, q = inputs[0].shape[2], gradients[0].shape[2]
    scales = None if scale is None else scale.detach().contiguous()
    lengths = lengths_of(parts, p, q) if scales is None else _scaled_lengths(parts, p, q, scales)
    if parts.total == 1 and scales is None:
        # |v| = S, rounded p + q + 16 times at most; the product with a weight included.
        return norms_of(parts, Bound(0.0, 1 + 2 * (p + q + 16) * UNIT, 0.0), lengths[:, :0], lengths)
    if scales is None and (gram or (parts.total <= FEW_POSITIONS and not exact)):
        squares = gram_of(parts, p, q)
        return norms_of(parts, bound(parts.total, signed=signed_roundings(parts, p, q)), squares, lengths)
    squares = _tiles(parts, p, q, scales)
    return norms_of(parts, bound(parts.total, squares=SIDE * SIDE + squares.shape[1]), squares, lengths)


def linear_sum(
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    point_weights: Sequence[float],
    weights: Tensor,
    out: Tensor,
    *,
    scale: Tensor | None = None,
    exact: bool = False,  # noqa: ARG001
) -> None:
    """See `dpcore.spec.pair_ops.PairOperations.linear_sum`.

    A program adds a tile of the matrix, example by example: first an example's T products, then, times its weight, to
    the others'. Where T is 1 both are one product over the batch, since a term is a whole example. `exact` changes
    nothing: everything is float64.
    """
    check_linear(inputs, gradients, point_weights, scale)
    p, q = inputs[0].shape[2], gradients[0].shape[2]
    examples = inputs[0].shape[0]
    check_sum(examples, p * q, weights, out)
    arrays = {"inputs": inputs, "gradients": gradients, "scale": () if scale is None else [scale]}
    float32_only(**arrays)
    device = common_device(**arrays, weights=[weights], out=[out])
    parts = parts_of(inputs, gradients, point_weights, device)
    scales = None if scale is None else scale.detach().contiguous()
    launch(
        _sum_kernel, (tiles_of(p, q),), device, parts.rows, parts.row_of, weights.detach().contiguous(),
        out if scales is None else scales, out, examples, p, q, parts.total,
        SCALED=scale is not None, ONE=parts.total == 1 and scale is None, SIDE=SIDE, DEPTH=DEPTH,
    )  # fmt: skip


def tiles_of(p: int, q: int) -> int:
    """Return how many tiles a (q, p) matrix has."""
    return -(-p // SIDE) * -(-q // SIDE)


def _scaled_lengths(parts: Parts, p: int, q: int, scale: Tensor) -> Tensor:
    """Return the norm of each scaled term, by ``sum_{r,c} (e_r s_rc a_c)^2``: (B, T)."""
    lengths = parts.empty(parts.total)
    launch(
        _scaled_lengths_kernel, (parts.examples * -(-parts.total // POSITIONS),), parts.device, parts.rows,
        parts.row_of, scale, lengths, p, q, parts.total, POSITIONS=POSITIONS, SIDE=SIDE, DEPTH=DEPTH,
    )  # fmt: skip
    return lengths


def _tiles(parts: Parts, p: int, q: int, scale: Tensor | None) -> Tensor:
    """Return the sum of squares of each tile of v: (B, tiles)."""
    squares = parts.empty(tiles_of(p, q))
    launch(
        _tiles_kernel, (squares.numel(),), parts.device, parts.rows, parts.row_of,
        squares if scale is None else scale, squares, p, q, parts.total,
        SCALED=scale is not None, SIDE=SIDE, DEPTH=DEPTH,
    )  # fmt: skip
    return squares


@kernel("p", "q", "total")
def _scaled_lengths_kernel(
    rows, row_of, scale, lengths, p, q, total, POSITIONS: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    blocks = (total + POSITIONS - 1) // POSITIONS
    example, position = tl.program_id(0) // blocks, tl.program_id(0) % blocks * POSITIONS + tl.arange(0, POSITIONS)
    mask, left = position < total, 0
    a, e = rows_at(rows, row_of, example, position, mask, 1), rows_at(rows, row_of, example, position, mask, 4)
    squares = tl.zeros((POSITIONS,), tl.float64)
    while left < p:
        column, top = left + tl.arange(0, SIDE), 0
        inside, sums = column < p, tl.zeros((POSITIONS, SIDE), tl.float64)
        while top < q:
            row = (top + tl.arange(0, DEPTH)).to(tl.int64)
            used = row < q
            y = tl.load(e[:, None] + row[None, :], mask=mask[:, None] & used[None, :], other=0.0).to(tl.float64)
            at = scale + (row[:, None] * p + column[None, :])
            s = tl.load(at, mask=used[:, None] & inside[None, :], other=0.0).to(tl.float64)
            sums = dot(y * y, s * s, sums)
            top += DEPTH
        x = tl.load(a[:, None] + column[None, :], mask=mask[:, None] & inside[None, :], other=0.0).to(tl.float64)
        squares += tl.sum(sums * (x * x), axis=1)
        left += SIDE
    length = tl.abs(weights_at(rows, row_of, position, mask)) * tl.sqrt(squares)
    tl.store(lengths + (example.to(tl.int64) * total + position), length, mask=mask)


@kernel("p", "q", "total")
def _tiles_kernel(
    rows, row_of, scale, squares, p, q, total, SCALED: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    tiles = (p + SIDE - 1) // SIDE * ((q + SIDE - 1) // SIDE)
    example = tl.program_id(0) // tiles
    row, column = places(tl.program_id(0) % tiles, p, SIDE)
    v = gradient_of(rows, row_of, example, row, column, p, q, total, SIDE, DEPTH)
    if SCALED:
        inside = (row < q)[:, None] & (column < p)[None, :]
        v *= tl.load(scale + (row[:, None] * p + column[None, :]), mask=inside, other=0.0).to(tl.float64)
    tl.store(squares + tl.program_id(0), tl.sum(tl.sum(v * v, axis=1), axis=0))


@jit
def places(tile, p, SIDE: tl.constexpr):
    """Return the rows and columns of a tile."""
    across = (p + SIDE - 1) // SIDE
    row = (tile // across).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    return row, (tile % across).to(tl.int64) * SIDE + tl.arange(0, SIDE)


@jit
def gradient_of(rows, row_of, example, row, column, p, q, total, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    """Return a tile of an example's gradient."""
    sums, start = tl.zeros((SIDE, SIDE), tl.float64), 0
    while start < total:
        position = start + tl.arange(0, DEPTH)
        e, a = factors_of(rows, row_of, example, position, position < total, row, column, p, q)
        sums = dot(e, a, sums)
        start += DEPTH
    return sums


@jit
def factors_of(rows, row_of, example, position, mask, row, column, p, q):
    """Return gradients (rows of the matrix, positions), times their point weights, and inputs (positions, columns)."""
    at = rows_at(rows, row_of, example, position, mask, 4)[None, :] + row[:, None]
    e = tl.load(at, mask=mask[None, :] & (row < q)[:, None], other=0.0).to(tl.float64)
    to = rows_at(rows, row_of, example, position, mask, 1)[:, None] + column[None, :]
    a = tl.load(to, mask=mask[:, None] & (column < p)[None, :], other=0.0).to(tl.float64)
    return e * weights_at(rows, row_of, position, mask)[None, :], a


@kernel("examples", "p", "q", "total")
def _sum_kernel(
    rows, row_of, weights, scale, out, examples, p, q, total,
    SCALED: tl.constexpr, ONE: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row, column = places(tl.program_id(0), p, SIDE)
    at = row[:, None] * p + column[None, :]
    inside = (row < q)[:, None] & (column < p)[None, :]
    sums, start = tl.zeros((SIDE, SIDE), tl.float64), 0
    # An example of weight 0 is not read: what it holds cannot matter, not even NaN.
    if ONE:
        while start < examples:
            example = start + tl.arange(0, DEPTH)
            weight = tl.load(weights + example, mask=example < examples, other=0.0).to(tl.float64)
            e, a = factors_of(rows, row_of, example, example * 0, weight != 0, row, column, p, q)
            sums = dot(e * weight[None, :], a, sums)
            start += DEPTH
    else:
        while start < examples:
            weight = tl.load(weights + start).to(tl.float64)
            if weight != 0:
                v = gradient_of(rows, row_of, start, row, column, p, q, total, SIDE, DEPTH)
                if SCALED:
                    v *= tl.load(scale + at, mask=inside, other=0.0).to(tl.float64)
                sums += weight * v
            start += 1
    tl.store(out + at, tl.load(out + at, mask=inside, other=0.0) + sums, mask=inside)
