"""Linear layers on tensor cores: norms, and sums. `dpcore_triton.cores` says how exact they are."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from dpcore_triton.cores import (
    _INTERPRETED,
    BATCH,
    CORE_DEPTH,
    LARGEST_WEIGHT,
    MARGIN,
    RAISED,
    ROW,
    SIDE,
    SPLIT_DEPTH,
    WORD,
    multiplied,
    read,
    square_sum,
    words_of,
)
from dpcore_triton.launch import ROWS, jit, kernel
from dpcore_triton.layers import Layers, layer_at, located, sizes_of
from dpcore_triton.pairs import FIELDS, WIDTH, rows_at, weights_at

Tensor = torch.Tensor


def warps_of_gram(*, split: bool) -> int:
    """Return the warps of a program of `fill_gram`: more where a loop loads more, so that its places have registers."""
    return 4 if split else 8


class Tile(NamedTuple):
    """A tile of an example's matrix, the positions that are loaded together, and the warps of its program."""

    high: int
    wide: int
    depth: int
    warps: int

    def number(self, p: int, q: int) -> int:
        """Return how many of them a (q, p) matrix has."""
        return -(-p // self.wide) * -(-q // self.high)

    def settings(self) -> dict[str, Any]:
        """Return what a kernel is started with."""
        return {"HIGH": self.high, "WIDE": self.wide, "DEPTH": self.depth, "warps": self.warps}


SPLIT = Tile(SIDE, SIDE, int(SPLIT_DEPTH.value), 4)
"""Of float32 numbers, which are split in registers."""
NORMS = Tile(128, 128, int(CORE_DEPTH.value), 8)
SUMS = Tile(64, 128, int(CORE_DEPTH.value), 8)
WIDE_SUMS = Tile(128, 128, int(CORE_DEPTH.value), 8)
"""Of 16-bit numbers in one chain on a chip whose tensor cores would wait for the operands of smaller tiles."""


def tile_of_norms(*, split: bool) -> Tile:
    """Return the tiles of `fill_tiles`."""
    return SPLIT if split else NORMS


def tile_of_sums(*, split: bool, chained: bool, wide: bool) -> Tile:
    """Return the tiles of `add_sums`: `wide` ones have registers for one chain only."""
    return SPLIT if split else WIDE_SUMS if wide and chained else SUMS


def blocks_of(counts: Sequence[int]) -> int:
    """Return how many blocks parts of so many positions are: none has positions of two."""
    return sum(-(-count // SIDE) for count in counts)


def fill_lengths(layers: Layers, lengths: Tensor, chosen: Sequence[bool]) -> None:
    """Put a bound on the norm of each term, with raised coordinates, to its place: (B, T) of the chosen layers."""
    examples = layers.parts.examples
    units = [-(-row.total // ROWS) if own else 0 for row, own in zip(layers.rows, chosen, strict=True)]
    own = [(0, 0)] * len(units)
    layers.start(_lengths_kernel, units, examples, own, lengths, examples, ROWS=ROWS, COLUMNS=WIDTH)


def fill_tiles(layers: Layers, squares: Tensor, units: Sequence[int], places: Sequence[int]) -> None:
    """Put the sum of squares of each tile of v to its place: (B, tiles) of the layers with units."""
    examples, own = layers.parts.examples, [(place, 0) for place in places]
    for split in (False, True):
        some = [count if split == layers.split(place) else 0 for place, count in enumerate(units)]
        tile = tile_of_norms(split=split).settings()
        layers.start(_tiles_kernel, some, examples, own, squares, examples, **tile)


def fill_gram(layers: Layers, squares: Tensor, units: Sequence[int], places: Sequence[int]) -> None:
    """Put sums of ``(a_s . a_t)(e_s . e_t)`` that add up to |v|^2 to their places: (B, `blocks_of`)."""
    examples, own = layers.parts.examples, list(zip(places, units, strict=True))
    for split in (False, True):
        some = [count if split == layers.split(place) else 0 for place, count in enumerate(units)]
        layers.start(_gram_kernel, some, examples, own, squares, examples, SIDE=SIDE, warps=warps_of_gram(split=split))


def add_sums(
    layers: Layers,
    chains: Sequence[bool | None],
    own: Sequence[tuple[int, int]],
    *,
    wide: bool,
    overwrite: bool,
) -> None:
    """Add the examples' vectors to the sums; `own` are the addresses of weights and sums.

    `chains` says which layers are multiplied in one chain; None for those that are not summed here. To `overwrite` sums
    of several batches, clear them before.
    """
    examples = layers.parts.examples
    kinds = [None if chain is None else (layers.split(place), chain) for place, chain in enumerate(chains)]
    for kind in dict.fromkeys(filter(None, kinds)):
        tile = tile_of_sums(split=kind[0], chained=kind[1], wide=wide)
        units = [tile.number(row.p, row.q) * (each == kind) for row, each in zip(layers.rows, kinds, strict=True)]
        copies, settings = -(-examples // BATCH.value), tile.settings()
        shape = {"CHAINED": kind[1], "OVERWRITE": overwrite and copies == 1, **settings}
        layers.start(_sum_kernel, units, copies, own, examples, **shape)


@jit
def counted(count):
    """Return a number as the end of a range; the interpreter of Triton 3.6 takes none but Python's."""
    if _INTERPRETED:
        return int(count.handle.data.item())
    return count


@jit
def weight_of(part):
    """Return the point weight of a part."""
    return tl.load(part + 7).to(tl.float64, bitcast=True).to(tl.float32)


@jit
def side_of(part, example, FIELD: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return where an example's rows of a part begin, and how far they lie apart."""
    at, apart = tl.load(part + FIELD).to(tl.pointer_type(KIND)), tl.load(part + FIELD + 1)
    step = tl.load(part + FIELD + 2)
    if ALIGNED:  # the host has seen it, and loads of 16 bytes need to know
        at, apart = tl.multiple_of(at, 16), tl.multiple_of(apart, 8)
        step = tl.multiple_of(step.to(tl.int32), 8)
    return at + example * apart, step


@jit
def tile_of(
    rows, first, last, example, row, column, p, q, used,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, CHAINED: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return a tile of an example's gradient, over the parts from `first` to `last`; zeros where not `used`.

    In one chain it stays on the tensor core, and is not multiplied by a point weight.
    """
    v, inner = tl.zeros((HIGH, WIDE), tl.float32), tl.arange(0, DEPTH)
    for index in range(counted(first), counted(last + 1)):
        part = rows + index * FIELDS
        e, e_step = side_of(part, example, 4, KIND, ALIGNED)
        a, a_step = side_of(part, example, 1, KIND, ALIGNED)
        weight = weight_of(part)
        end = tl.where(used, tl.load(part + 8), 0).to(tl.int32)
        to, at = (inner * e_step)[None, :] + row[:, None], (inner * a_step)[:, None] + column[None, :]
        for start in range(0, counted(end), DEPTH):
            inside = inner < end - start
            left = read(e + start * e_step + to, (row < q)[:, None] & inside[None, :])
            right = read(a + start * a_step + at, inside[:, None] & (column < p)[None, :])
            if CHAINED:
                v = multiplied(left, right, v, KIND)
            else:
                v = tl.fma(weight, multiplied(left, right, tl.zeros((HIGH, WIDE), tl.float32), KIND), v)
    return v


@jit
def core_sizes_of(layer, ALIGNED: tl.constexpr):
    """Return p, q and the first and last position of a layer; the compiler learns that aligned ones are multiples."""
    p, q, first, end = sizes_of(layer)
    if ALIGNED:
        p, q = p // 8 * 8, q // 8 * 8
    return p, q, first, end


@jit
def parts_at(row_of, first, end):
    """Return the first and the last part of a layer's positions."""
    return tl.load(row_of + first), tl.load(row_of + end - 1)


@jit
def corners(tile, p, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Return the rows and columns of a tile."""
    across = (p + WIDE - 1) // WIDE
    return tile // across * HIGH + tl.arange(0, HIGH), tile % across * WIDE + tl.arange(0, WIDE)


@kernel("examples")
def _lengths_kernel(
    rows, row_of, layers, layer_of, lengths, examples,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    layer, within = located(layers, layer_of, examples)
    p, q, first, end = sizes_of(layer)
    blocks = (end - first + ROWS - 1) // ROWS
    example, time = (within // blocks).to(tl.int64), within % blocks * ROWS + tl.arange(0, ROWS)
    mask, position = time < end - first, first + time
    a = length_of(rows_at(rows, row_of, example, position, mask, 1, KIND), mask, p, ALIGNED, ROWS, COLUMNS)
    e = length_of(rows_at(rows, row_of, example, position, mask, 4, KIND), mask, q, ALIGNED, ROWS, COLUMNS)
    weight = tl.abs(weights_at(rows, row_of, position, mask))
    at = lengths + (tl.load(layer + 4) * examples + example * (end - first) + time)
    tl.store(at, weight * (a.to(tl.float64) * e.to(tl.float64)), mask=mask)


@jit
def length_of(at, mask, width, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a bound on the norm of each row, with raised coordinates; infinity for a long one, and for NaN."""
    if ALIGNED:
        width = width // 8 * 8
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, counted(width), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        to = at[:, None] + column[None, :]
        if ALIGNED:
            to = tl.multiple_of(to, (1, 16))
        x = read(to, mask[:, None] & (column < width)[None, :]).to(tl.float32)
        sums += x * x
    square = tl.sum(sums, axis=1)
    raised = (tl.sqrt(square) + tl.sqrt((width + 0.0).to(tl.float32)) * RAISED) * MARGIN
    return tl.where(square < ROW, raised, float("inf"))


@kernel("examples")
def _tiles_kernel(
    rows, row_of, layers, layer_of, squares, examples,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    layer, within = located(layers, layer_of, examples)
    p, q, first, end = core_sizes_of(layer, ALIGNED)
    tiles = (p + WIDE - 1) // WIDE * ((q + HIGH - 1) // HIGH)
    row, column = corners(within % tiles, p, HIGH, WIDE)
    part, last = parts_at(row_of, first, end)
    example = within // tiles
    v = tile_of(rows, part, last, example, row, column, p, q, True, KIND, ALIGNED, False, HIGH, WIDE, DEPTH)
    tl.store(squares + (tl.load(layer + 6) * examples + within), square_sum(v))


@kernel("examples")
def _sum_kernel(
    rows, row_of, layers, layer_of, examples,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, CHAINED: tl.constexpr, OVERWRITE: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    batches = (examples + BATCH - 1) // BATCH
    layer = layer_at(tl.program_id(0) // batches, layers, layer_of)
    p, q, first, end = core_sizes_of(layer, ALIGNED)
    row, column = corners((tl.program_id(0) // batches - tl.load(layer)).to(tl.int32), p, HIGH, WIDE)
    part, last = parts_at(row_of, first, end)
    weights, begin = tl.load(layer + 6).to(tl.pointer_type(tl.float64)), tl.program_id(0) % batches * BATCH
    highs, lows = tl.zeros((HIGH, WIDE), tl.int32), tl.zeros((HIGH, WIDE), tl.int32)
    for example in range(counted(begin), counted(tl.minimum(begin + BATCH, examples))):
        weight = tl.load(weights + example)
        # An example of weight 0 is not read: what it holds cannot matter, not even NaN.
        used = weight != 0
        v = tile_of(rows, part, last, example, row, column, p, q, used, KIND, ALIGNED, CHAINED, HIGH, WIDE, DEPTH)
        if CHAINED:
            weight *= weight_of(rows + part * FIELDS)
        weight = tl.minimum(tl.maximum(weight, -LARGEST_WEIGHT), LARGEST_WEIGHT).to(tl.float32)
        high, low = words_of(v, weight)
        highs += high
        lows += low
    out = tl.load(layer + 7).to(tl.pointer_type(tl.float64))
    # Half a tile at a time: all addresses of a whole one have no place in registers.
    left, right = halves(column[None, :])
    left_high, right_high = halves(highs)
    left_low, right_low = halves(lows)
    put_words(out, row, left, p, q, left_high, left_low, OVERWRITE)
    put_words(out, row, right, p, q, right_high, right_low, OVERWRITE)


@jit
def halves(x):
    """Return the left and the right half of a matrix."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@jit
def put_words(out, row, column, p, q, highs, lows, OVERWRITE: tl.constexpr):
    """Add the numbers that words stand for to the matrix at `out`, which has fewer than 2^31, or put them there."""
    inside = (row < q)[:, None] & (column < p)
    to = out + ((row * p)[:, None] + column)
    found = highs.to(tl.float64) * WORD + lows.to(tl.float64)
    if OVERWRITE:
        tl.store(to, found, mask=inside)
    else:  # other batches add to the same numbers: integers, so that the order makes no difference
        tl.atomic_add(to, found, mask=inside, sem="relaxed")


@kernel("examples")
def _gram_kernel(
    rows, row_of, layers, layer_of, squares, examples,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    layer, within = located(layers, layer_of, examples)
    p, q, first, end = core_sizes_of(layer, ALIGNED)
    blocks = tl.load(layer + 7).to(tl.int32)
    example, block = within // blocks, within % blocks
    own, last = parts_at(row_of, first, end)
    count = (tl.load(rows + own * FIELDS + 8).to(tl.int32) + SIDE - 1) // SIDE
    while block >= count:
        block -= count
        own += 1
        count = (tl.load(rows + own * FIELDS + 8).to(tl.int32) + SIDE - 1) // SIDE
    part, start = rows + own * FIELDS, block * SIDE
    a, a_step = side_of(part, example, 1, KIND, ALIGNED)
    e, e_step = side_of(part, example, 4, KIND, ALIGNED)
    weight, stop = weight_of(part), tl.load(part + 8).to(tl.int32)
    sums = tl.zeros((SIDE, SIDE), tl.float32)
    for index in range(counted(own), counted(last + 1)):
        other = rows + index * FIELDS
        b, b_step = side_of(other, example, 1, KIND, ALIGNED)
        f, f_step = side_of(other, example, 4, KIND, ALIGNED)
        factor, end = weight_of(other), tl.load(other + 8).to(tl.int32)
        for begin in range(counted(tl.where(own == index, start, 0)), counted(end), SIDE):
            # Blocks off the diagonal stand for two.
            twice = tl.where((own == index) & (start == begin), factor, 2 * factor)
            x = inner_products(a, a_step, start, stop, b, b_step, begin, end, p, weight, KIND, SIDE)
            y = inner_products(e, e_step, start, stop, f, f_step, begin, end, q, twice, KIND, SIDE)
            sums += x * y
    total = tl.sum(tl.sum(sums, axis=1).to(tl.float64), axis=0)
    tl.store(squares + (tl.load(layer + 6) * examples + within), total)


@jit
def inner_products(
    at, step, start, stop, to, other_step, begin, end, width, weight,
    KIND: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Return inner products, times `weight`, of the rows from `start` on at `at` and those from `begin` on at `to`."""
    DEPTH: tl.constexpr = SPLIT_DEPTH if tl.float32 == KIND else CORE_DEPTH
    one, two = start + tl.arange(0, SIDE), begin + tl.arange(0, SIDE)
    left, right = at + (one * step)[:, None], to + (two * other_step)[None, :]
    sums = tl.zeros((SIDE, SIDE), tl.float32)
    for first in range(0, counted(width), DEPTH):
        column = first + tl.arange(0, DEPTH)
        x = read(left + column[None, :], (one < stop)[:, None] & (column < width)[None, :])
        y = read(right + column[:, None], (column < width)[:, None] & (two < end)[None, :])
        sums = tl.fma(weight, multiplied(x, y, tl.zeros((SIDE, SIDE), tl.float32), KIND), sums)
    return sums
