"""Weight gradients of linear maps, as pairs of activations and output gradients: certified norms, weighted sums."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl

from dpcore.spec.check_pairs import check_layers, check_sums
from dpcore.spec.contributions import WIDEST_SLICED, rounding_of_slices
from dpcore.spec.pair_ops import LinearPairs
from dpcore_triton import core_linear, slices
from dpcore_triton.arrays import clear
from dpcore_triton.chips import Chip, chip_of
from dpcore_triton.cores import BATCH, CHAIN, FARTHEST, LARGEST, WIDEST, gram_bound, rounding, tiles_bound
from dpcore_triton.cores import SIDE as CORE_SIDE
from dpcore_triton.gram import blocks_of, fill_gram, fill_lengths, signed_roundings
from dpcore_triton.grid import nearest
from dpcore_triton.launch import KINDS, common_device, jit, kernel
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
    far_exponent_of,
    lifted,
    norms_of,
    rows_at,
    weights_at,
)
from dpcore_triton.row_norms import Scales

Tensor = torch.Tensor

# Positions up to which inner products are cheaper than a tile, whose product takes DEPTH positions at least.
FEW_POSITIONS = 8
# Positions up to which inner products are taken on tensor cores: what they add to a norm grows with them.
GRAM_POSITIONS = 256
# Examples of one position whose rows are loaded together.
TOGETHER = 2
# Norms and sums of pairs of 16 bits, over a product at the peak; the shares of their peaks that torch's products and
# memory have; and by how much pairs must be cheaper: all as `asv_benchmarks/predicted.py` has it, not measured.
PAIRED, PAIRED_WIDE, PEAK, PEAK_BANDWIDTH, CHEAPER = 3.6, 5.0, 0.65, 0.85, 0.9
# Bytes that pass through memory for a number of float32 and its factor: read, written, read again.
MOVED = 8


def linear_norms(layers: Sequence[LinearPairs[Tensor]], scales: Scales = None) -> tuple[Tensor, ...]:
    """See `dpcore.spec.pair_ops.PairOperations.linear_norms`.

    A launch for each kind of kernel, whatever the number of layers. Where tensor cores are not used everything is
    float64 but for norms of terms, which are added in float32 and raised: then `exact` only keeps few positions from
    inner products, which are looser where terms cancel. An example's numbers meet no other's. No atomics: the result is
    the same every time.
    """
    check_layers(layers, scales)
    exponents = [exponent_of(layer.point_weights) for layer in layers]
    layers, ways = _ways(layers, scales, norms=True)
    given = layers_of(layers, scales, exponents, halves=True)
    units = [_units(row, layer, way) for row, layer, way in zip(given.rows, layers, ways, strict=True)]
    places = [stop - own for stop, own in zip(accumulate(units), units, strict=True)]
    lengths, squares = given.parts.empty(given.parts.total), given.parts.empty(sum(units))
    cores = ["core" in way for way in ways]
    fill_lengths(given, lengths, [not (row.scale or own) for row, own in zip(given.rows, cores, strict=True)])
    core_linear.fill_lengths(given, lengths, cores)
    _fill_scaled_lengths(given, lengths)
    for name, fill in _FILLS.items():
        fill(given, squares, [own if way == name else 0 for own, way in zip(units, ways, strict=True)], places)
    bounds = [_bound(*each) for each in zip(given.rows, layers, ways, strict=True)]
    sums = [
        Sum(chosen, exponent, place, own, row.first, row.total)
        for row, chosen, exponent, place, own in zip(given.rows, bounds, exponents, places, units, strict=True)
    ]
    return norms_of(given.parts, sums, squares, lengths)


def linear_way(layer: LinearPairs[Tensor], device: Any, *, scaled: bool = False) -> str:
    """See `dpcore.spec.pair_ops.PairOperations.linear_way`."""
    chip = chip_of(device)
    ways = [way_of(layer, chip, scaled=scaled, sliced=sliced) for sliced in (False, True)]
    if "core" in ways[0]:
        words = "inner products" if ways[0] == "core gram" else "tiles"
        return f"{words}, {'3 products' if _split(layer) else 'one product'} of 16 bits"
    words = {"one": "one position", "gram": "inner products", "tiles": "tiles"}[ways[0]]
    if ways[1] == "slices":
        return f"{words}, sum of 8 bits"
    reasons = {"scaled": scaled, "points subtracted": layer.exact, "chip unknown": chip is None}
    why = next((reason for reason, holds in reasons.items() if holds), "cheaper")
    return f"{words} in float64: {why}"


def _ways(
    layers: Sequence[LinearPairs[Tensor]], scales: Scales, *, norms: bool, sliced: bool = False, cores: bool = True
) -> tuple[list[LinearPairs[Tensor]], list[str]]:
    """Return how each layer is multiplied, and layers in a dtype that this takes: one, and float32 for float64."""
    chip, given = chip_of(layers[0].inputs[0].device), [None] * len(layers) if scales is None else scales
    ways = [
        way_of(layer, chip, scaled=scale is not None, sliced=sliced) for layer, scale in zip(layers, given, strict=True)
    ]
    if not cores:
        ways = ["tiles" if "core" in way else way for way in ways]
    return [_read_as(layer, way, norms=norms) for layer, way in zip(layers, ways, strict=True)], ways


def _read_as(layer: LinearPairs[Tensor], way: str, *, norms: bool) -> LinearPairs[Tensor]:
    """Return the layer with its arrays of 16 bits in float32, where the way reads no others."""
    if _reads_halves(layer, way, norms=norms):
        return layer
    # Float64 is left for the refusal.
    sides = [[x.float() if x.dtype in KINDS else x for x in side] for side in (layer.inputs, layer.gradients)]
    return layer._replace(inputs=sides[0], gradients=sides[1])


def _reads_halves(layer: LinearPairs[Tensor], way: str, *, norms: bool) -> bool:
    """Return whether a way reads the layer's arrays of 16 bits as they are."""
    return ("core" in way or way == ("one" if norms else "slices")) and not _split(layer)


def prefers_pairs(layer: LinearPairs[Tensor], device: Any) -> bool:
    """See `dpcore.spec.pair_ops.PairOperations.prefers_pairs`: arrays of 16 bits, and sums in one chain.

    A formed matrix is a product by torch, and is written once and read twice, by more instructions than a wide chip has
    time for.
    """
    chip, total, p, q = chip_of(device), sum(_counts(layer)), layer.inputs[0].shape[2], layer.gradients[0].shape[2]
    if chip is None or not _chained(layer) or "core" not in way_of(layer, chip, scaled=False):
        return False
    product, tile = 2 * total / chip.bfloat16, core_linear.SUMS
    filled = tile.number(p, q) * tile.high * tile.wide / (p * q)
    pairs = product * filled * (PAIRED_WIDE if chip.wide else PAIRED)
    passes = 3.6 if chip.wide else 3.0
    return pairs < CHEAPER * (product / PEAK + 2 * passes / chip.bandwidth / PEAK_BANDWIDTH)


def sliced_rounding(layer: LinearPairs[Tensor], longest: float, *, scaled: bool = False) -> float:
    """See `dpcore.spec.pair_ops.PairOperations.sliced_rounding`."""
    way = way_of(layer, chip_of(layer.inputs[0].device), scaled=scaled, sliced=True)
    return rounding_of_slices(layer.gradients[0].shape[2], longest) if way == "slices" else 0.0


def copies_halves(layer: LinearPairs[Tensor] | None, device: Any, *, scaled: bool = False) -> bool:
    """See `dpcore.spec.pair_ops.PairOperations.copies_halves`. Norms and sums may be taken in two ways."""
    if layer is None:
        return True
    chip = chip_of(device)
    ways = {norms: way_of(layer, chip, scaled=scaled, sliced=not norms) for norms in (True, False)}
    return not all(_reads_halves(layer, way, norms=norms) for norms, way in ways.items())


def _split(layer: LinearPairs[Tensor]) -> bool:
    """Return whether tensor cores take the layer's numbers as two each: they are not all of one dtype of 16 bits."""
    kinds = {x.dtype for x in (*layer.inputs, *layer.gradients)}
    return len(kinds) > 1 or not kinds <= {torch.bfloat16, torch.float16}


def way_of(layer: LinearPairs[Tensor], chip: Chip | None, *, scaled: bool, sliced: bool = False) -> str:
    """Return how a layer's norms are taken. Where it is on tensor cores, so are its sums.

    If sums may be `sliced`, return how one position is added; its norm is a product of two norms all the same.

    It follows from shapes, dtype and chip, and not from the number of examples. Scaled layers, whose terms' norms take
    as many products as v itself, one position, and what is to be exact are not on tensor cores.
    """
    sizes = total, p, q = sum(_counts(layer)), layer.inputs[0].shape[2], layer.gradients[0].shape[2]
    if scaled:
        return "tiles"
    if total == 1:
        return "slices" if sliced and _sliced_is_faster(p, q, chip) else "one"
    plain = "gram" if layer.gram or (total <= FEW_POSITIONS and not layer.exact) else "tiles"
    if chip is None or layer.exact or 0 in sizes or max(p, q) > WIDEST or p * q > LARGEST:
        return plain
    split = _split(layer)
    tile, time = core_linear.tile_of_norms(split=split), (3 if split else 1) / chip.bfloat16
    chunks = -(-total // tile.depth) * tile.depth
    costs = {"core tiles": chunks * tile.number(p, q) * tile.high * tile.wide * time}
    if total <= GRAM_POSITIONS:
        rows = -(-total // CORE_SIDE) * CORE_SIDE
        costs["core gram"] = rows * (rows + CORE_SIDE) / 2 * (p + q) * time
    rows, wide, high = (-(-size // side) * side for size, side in zip(sizes, (DEPTH, SIDE, SIDE), strict=True))
    costs[plain] = (rows * rows / 2 * (p + q) if plain == "gram" else rows * wide * high) / chip.float64
    return min(costs, key=costs.__getitem__)


def _sliced_is_faster(p: int, q: int, chip: Chip | None) -> bool:
    """Return whether four products of bytes, at twice the rate of bfloat16, are, and their factors' memory."""
    if chip is None or 0 in (p, q) or max(p, q) > WIDEST_SLICED:
        return False
    tile = slices.WIDE_SUMS if chip.wide else slices.SUMS
    wide, high = -(-p // tile.wide) * tile.wide, -(-q // tile.high) * tile.high
    factors = MOVED * (p + q) / 2 / chip.bandwidth
    wide_one, high_one = (-(-size // SIDE) * SIDE for size in (p, q))
    # Four operations of float64, none of which is a product with an addition.
    return 4 * wide * high / (2 * chip.bfloat16) + factors < 4 * wide_one * high_one / chip.float64


def _units(row: Layer, layer: LinearPairs[Tensor], way: str) -> int:
    """Return how many numbers of an example add up to Q."""
    if "core" in way:
        gram = way == "core gram"
        tile = core_linear.tile_of_norms(split=_split(layer))
        return core_linear.blocks_of(_counts(layer)) if gram else tile.number(row.p, row.q)
    return {"one": 0, "gram": blocks_of(row.total), "tiles": tiles_of(row.p, row.q)}[way]


def _chained(layer: LinearPairs[Tensor]) -> bool:
    """Return whether a sum's products stay on the tensor core, over all positions: few, and all of one weight."""
    return not _split(layer) and sum(_counts(layer)) <= CHAIN and len(set(layer.point_weights)) == 1


def _counts(layer: LinearPairs[Tensor]) -> list[int]:
    """Return the positions of each part."""
    return [part.shape[1] for part in layer.inputs]


def _bound(row: Layer, layer: LinearPairs[Tensor], way: str) -> Bound:
    """Return how N follows."""
    if "core" in way:
        split = _split(layer)
        rho, blocks = rounding(_counts(layer), split=split), core_linear.blocks_of(_counts(layer))
        summed = rounding(_counts(layer), split=split, chained=_chained(layer))
        return (
            gram_bound(summed, row.p, row.q, blocks, split=split) if way == "core gram" else tiles_bound(rho + summed)
        )
    if way == "one":
        # |v| = S, whose squares `fill_lengths` sees to, rounded in float64 p + q + 16 times at most.
        return Bound(0.0, 1 + 2 * (row.p + row.q + 16) * UNIT, 0.0)
    if way == "gram":
        return bound(row.total, signed=signed_roundings(row.p, row.q, row.total))
    return bound(row.total, squares=SIDE * SIDE + tiles_of(row.p, row.q))


def linear_sums(
    layers: Sequence[LinearPairs[Tensor]],
    weights: Sequence[Tensor],
    out: Sequence[Tensor],
    scales: Scales = None,
    longest: Sequence[float] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """See `dpcore.spec.pair_ops.PairOperations.linear_sums`.

    A program adds a tile of a matrix, example by example: first an example's T products, then, times its weight and
    rounded to integers, to the others'. Where T is 1 an example's tile is one column times one row, or a part of a
    product over all examples: see `dpcore_triton.slices`. Each of these four has a launch, the last one two. Words hold
    integers up to `FARTHEST` only: where `longest` is beyond it, as without noise, or not known, all
    but the products over all examples is float64.
    """
    check_layers(layers, scales)
    check_sums(layers, weights, out, longest)
    within = longest is not None and max(longest) <= FARTHEST
    layers, ways = _ways(layers, scales, norms=False, sliced=longest is not None, cores=within)
    exponents = [far_exponent_of(layer.point_weights) for layer in layers]
    given = layers_of(layers, scales, exponents, halves=True)
    common_device(layers=[layers[0].inputs[0]], weights=weights, out=out)
    factors = [lifted(own, exponent) for own, exponent in zip(weights, exponents, strict=True)]
    own = [(factor.data_ptr(), total.data_ptr()) for factor, total in zip(factors, out, strict=True)]
    meta = {"OVERWRITE": overwrite, "SIDE": SIDE, "DEPTH": DEPTH, "TOGETHER": TOGETHER}
    if overwrite:  # several batches add to one sum; none adds nothing
        examples = given.parts.examples
        most = [slices.BATCH if way == "slices" else BATCH if "core" in way else None for way in ways]
        clear([total for total, own in zip(out, most, strict=True) if own and not 0 < examples <= own.value])
    chains = [_chained(layer) if "core" in way else None for layer, way in zip(layers, ways, strict=True)]
    chip = chip_of(given.parts.device)
    meta_of_cores = {"wide": chip is not None and chip.wide, "overwrite": overwrite}
    core_linear.add_sums(given, chains, own, **meta_of_cores)
    slices.add_sums(given, [way == "slices" for way in ways], own, longest or (), **meta_of_cores)
    for one in (False, True):
        chosen = [
            row if way != "slices" and "core" not in way and one == (way == "one") else None
            for row, way in zip(given.rows, ways, strict=True)
        ]
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


def _fill_tiles(layers: Layers, squares: Tensor, units: Sequence[int], places: Sequence[int]) -> None:
    """Put the sum of squares of each tile of v to its place: (B, tiles), for the layers with units."""
    examples, own = layers.parts.examples, [(place, 0) for place in places]
    meta = {"SCALED": any(row.scale for row in layers.rows), "SIDE": SIDE, "DEPTH": DEPTH}
    layers.start(_tiles_kernel, units, examples, own, squares, examples, **meta)


_FILLS = {
    "gram": fill_gram,
    "tiles": _fill_tiles,
    "core gram": core_linear.fill_gram,
    "core tiles": core_linear.fill_tiles,
}


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
    SCALED: tl.constexpr, ONE: tl.constexpr, OVERWRITE: tl.constexpr,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, TOGETHER: tl.constexpr,
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
    if not OVERWRITE:
        sums += tl.load(out, mask=inside, other=0.0)
    tl.store(out, sums, mask=inside)
