"""Weight gradients of linear maps, as pairs of activations and output gradients: certified norms, weighted sums."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton.language as tl

from dpcore.spec.check_pairs import check_layers, check_sums
from dpcore.spec.pair_ops import LinearPairs
from dpcore_triton.gram import blocks_of, fill_gram, fill_lengths, signed_roundings
from dpcore_triton.grid import nearest
from dpcore_triton.launch import common_device, jit, kernel
from dpcore_triton.layers import Layer, Layers, layer_at, layers_of, located, scale_of, sizes_of
from dpcore_triton.pairs import (
    DEPTH,
    POSITIONS,
    SIDE,
    UNIT,
    Bound,
    Sum,
    bound,
    dot,
    exponent_of,
    norms_of,
    rows_at,
    weights_at,
)
from dpcore_triton.row_norms import Scales, contiguous

Tensor = torch.Tensor

# Positions up to which inner products are cheaper than a tile, whose product takes DEPTH positions at least.
FEW_POSITIONS = 8
# Examples of one position whose rows are loaded together.
TOGETHER = 2


def linear_norms(layers: Sequence[LinearPairs[Tensor]], scales: Scales = None) -> tuple[Tensor, ...]:
    """See `dpcore.spec.pair_ops.PairOperations.linear_norms`.

    A launch for each kind of kernel, whatever the number of layers. Everything is float64 here: `exact` only keeps few
    positions from inner products, which are looser where terms cancel. An example's numbers meet no other's. No
    atomics: the result is the same every time.
    """
    check_layers(layers, scales)
    exponents = [exponent_of(layer.point_weights) for layer in layers]
    given = layers_of(layers, scales, exponents)
    ways = [_way(row, layer) for row, layer in zip(given.rows, layers, strict=True)]
    units = [_units(row, way) for row, way in zip(given.rows, ways, strict=True)]
    places = [stop - own for stop, own in zip(accumulate(units), units, strict=True)]
    lengths, squares = given.parts.empty(given.parts.total), given.parts.empty(sum(units))
    fill_lengths(given, lengths, [not row.scale for row in given.rows])
    _fill_scaled_lengths(given, lengths)
    fill_gram(given, squares, [way == "gram" for way in ways], places)
    _fill_tiles(given, squares, [way == "tiles" for way in ways], places)
    sums = [
        Sum(_bound(row, way), exponent, place, own, row.first, row.total)
        for row, way, exponent, place, own in zip(given.rows, ways, exponents, places, units, strict=True)
    ]
    return norms_of(given.parts, sums, squares, lengths)


def _way(row: Layer, layer: LinearPairs[Tensor]) -> str:
    """Return how a layer's norms are taken."""
    if row.scale:
        return "tiles"
    if row.total == 1:
        return "one"
    return "gram" if layer.gram or (row.total <= FEW_POSITIONS and not layer.exact) else "tiles"


def _units(row: Layer, way: str) -> int:
    """Return how many numbers of an example add up to Q."""
    return {"one": 0, "gram": blocks_of(row.total), "tiles": tiles_of(row.p, row.q)}[way]


def _bound(row: Layer, way: str) -> Bound:
    """Return how N follows."""
    if way == "one":
        # |v| = S, rounded p + q + 16 times at most; the product with a weight included.
        return Bound(0.0, 1 + 2 * (row.p + row.q + 16) * UNIT, 0.0)
    if way == "gram":
        return bound(row.total, signed=signed_roundings(row.p, row.q, row.total))
    return bound(row.total, squares=SIDE * SIDE + tiles_of(row.p, row.q))


def linear_sums(
    layers: Sequence[LinearPairs[Tensor]], weights: Sequence[Tensor], out: Sequence[Tensor], scales: Scales = None
) -> None:
    """See `dpcore.spec.pair_ops.PairOperations.linear_sums`.

    A program adds a tile of a matrix, example by example: first an example's T products, then, times its weight and
    rounded to integers, to the others'. Where T is 1 an example's tile is one column times one row; such layers have a
    launch, and all others. `exact` changes nothing: everything is float64.
    """
    check_layers(layers, scales)
    check_sums(layers, weights, out)
    given = layers_of(layers, scales, [0] * len(layers))
    common_device(layers=[layers[0].inputs[0]], weights=weights, out=out)
    factors = [contiguous(own) for own in weights]
    own = [(factor.data_ptr(), total.data_ptr()) for factor, total in zip(factors, out, strict=True)]
    meta = {"SIDE": SIDE, "DEPTH": DEPTH, "TOGETHER": TOGETHER}
    for one in (False, True):
        chosen = [row if one == (row.total == 1 and not row.scale) else None for row in given.rows]
        units = [0 if row is None else tiles_of(row.p, row.q) for row in chosen]
        scaled = any(row is not None and row.scale for row in chosen)
        given.start(_sum_kernel, units, 1, own, given.parts.examples, SCALED=scaled, ONE=one, **meta)


def tiles_of(p: int, q: int) -> int:
    """Return how many tiles a (q, p) matrix has."""
    return -(-p // SIDE) * -(-q // SIDE)


def _fill_scaled_lengths(layers: Layers, lengths: Tensor) -> None:
    """Put the norm of each scaled term, by ``sum_{r,c} (e_r s_rc a_c)^2``, to its place: (B, T) of layers with one."""
    units = [blocks_of(row.total) if row.scale else 0 for row in layers.rows]
    examples, own = layers.parts.examples, [(0, 0)] * len(units)
    meta = {"POSITIONS": POSITIONS, "SIDE": SIDE, "DEPTH": DEPTH}
    layers.start(_scaled_lengths_kernel, units, examples, own, lengths, examples, **meta)


def _fill_tiles(layers: Layers, squares: Tensor, chosen: Sequence[bool], places: Sequence[int]) -> None:
    """Put the sum of squares of each tile of v to its place: (B, tiles) of the chosen layers."""
    units = [tiles_of(row.p, row.q) if own else 0 for row, own in zip(layers.rows, chosen, strict=True)]
    examples, own_ = layers.parts.examples, [(place, 0) for place in places]
    meta = {"SCALED": any(row.scale for row in layers.rows), "SIDE": SIDE, "DEPTH": DEPTH}
    layers.start(_tiles_kernel, units, examples, own_, squares, examples, **meta)


@kernel("examples")
def _scaled_lengths_kernel(
    rows, row_of, layers, layer_of, lengths, examples,
    POSITIONS: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    layer, within = located(layers, layer_of, examples)
    p, q, first, end = sizes_of(layer)
    blocks = (end - first + POSITIONS - 1) // POSITIONS
    example, position = within // blocks, first + within % blocks * POSITIONS + tl.arange(0, POSITIONS)
    mask, left = position < end, 0
    a, e = rows_at(rows, row_of, example, position, mask, 1), rows_at(rows, row_of, example, position, mask, 4)
    squares, scale = tl.zeros((POSITIONS,), tl.float64), tl.load(layer + 5).to(tl.pointer_type(tl.float32))
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
    start = tl.load(layer + 4) * examples + example.to(tl.int64) * (end - first)
    tl.store(lengths + (start + position - first), length, mask=mask)


@kernel("examples")
def _tiles_kernel(
    rows, row_of, layers, layer_of, squares, examples, SCALED: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    layer, within = located(layers, layer_of, examples)
    p, q, first, end = sizes_of(layer)
    tiles = (p + SIDE - 1) // SIDE * ((q + SIDE - 1) // SIDE)
    row, column = places(within % tiles, p, SIDE)
    v = gradient_of(rows, row_of, within // tiles, row, column, p, q, first, end, SIDE, DEPTH)
    if SCALED:
        v *= scale_of(layer, row, column, p, q)
    tl.store(squares + (tl.load(layer + 6) * examples + within), tl.sum(tl.sum(v * v, axis=1), axis=0))


@jit
def places(tile, p, SIDE: tl.constexpr):
    """Return the rows and columns of a tile."""
    across = (p + SIDE - 1) // SIDE
    row = (tile // across).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    return row, (tile % across).to(tl.int64) * SIDE + tl.arange(0, SIDE)


@jit
def gradient_of(rows, row_of, example, row, column, p, q, start, end, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    """Return a tile of an example's gradient, over the positions from `start` to `end`."""
    sums = tl.zeros((SIDE, SIDE), tl.float64)
    while start < end:
        position = start + tl.arange(0, DEPTH)
        e, a = factors_of(rows, row_of, example, position, position < end, row, column, p, q)
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


@jit
def term_of(rows, row_of, example, position, weight, row, column, p, q):
    """Return an example's gradients at one position, times both weights, and its inputs; zeros where `weight` is 0."""
    e = rows_at(rows, row_of, example, position, position >= 0, 4) + row
    a = rows_at(rows, row_of, example, position, position >= 0, 1) + column
    # None of the rows and columns of an example of weight 0. (The interpreter cannot mask by a vector and a scalar.)
    used = weight != 0
    e = tl.load(e, mask=row.to(tl.int32) < tl.where(used, q, 0), other=0.0).to(tl.float64)
    a = tl.load(a, mask=column.to(tl.int32) < tl.where(used, p, 0), other=0.0).to(tl.float64)
    return e * (weights_at(rows, row_of, position, position >= 0) * weight), a


@kernel("examples")
def _sum_kernel(
    rows, row_of, layers, layer_of, examples,
    SCALED: tl.constexpr, ONE: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    layer = layer_at(tl.program_id(0), layers, layer_of)
    p, q, first, end = sizes_of(layer)
    row, column = places((tl.program_id(0) - tl.load(layer)).to(tl.int32), p, SIDE)
    out = tl.load(layer + 7).to(tl.pointer_type(tl.float64))
    weights = tl.load(layer + 6).to(tl.pointer_type(tl.float64))
    sums, start = tl.zeros((SIDE, SIDE), tl.float64), 0
    # An example of weight 0 is not read: what it holds cannot matter, not even NaN.
    if ONE:
        while start < examples:
            for k in tl.static_range(TOGETHER):
                weight = tl.load(weights + start + k, mask=start + k < examples, other=0.0)
                e, a = term_of(rows, row_of, start + k, first, weight, row, column, p, q)
                sums += nearest(e[:, None] * a[None, :])
            start += TOGETHER
    else:
        while start < examples:
            weight = tl.load(weights + start)
            if weight != 0:
                v = gradient_of(rows, row_of, start, row, column, p, q, first, end, SIDE, DEPTH)
                if SCALED:
                    v *= scale_of(layer, row, column, p, q)
                sums += nearest(weight * v)
            start += 1
    inside = (row < q)[:, None] & (column < p)[None, :]
    out += row[:, None] * p + column[None, :]
    tl.store(out, tl.load(out, mask=inside, other=0.0) + sums, mask=inside)
