"""Layers of one position by factors of two bytes: sums on 8-bit tensor cores, whose 32-bit integers have no rounding.

`dpcore.spec.contributions` says what is added, and `dpcore_numpy.slices` which bits it has. One kernel makes the
factors: each number's upper and lower byte, where those of neighboring examples lie side by side. The other multiplies
them. A product of two bytes is at most 2^14 in size, so that two sums of `BATCH` of them stay below 2^31.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton.language as tl

from dpcore.spec import contributions
from dpcore_triton.core_linear import Tile, corners, counted
from dpcore_triton.launch import INTERPRETED, current_stream, jit, kernel, numbers
from dpcore_triton.layers import Layers, layer_at, sizes_of
from dpcore_triton.pairs import rows_at, weights_at

# Examples that are multiplied at once. The memory of factors is padded to multiples of them, and of a tile's rows on
# both sides. What lies behind a matrix's last row meets no number that is stored; an example too many is 0.
DEPTH = tl.constexpr(64)
SUMS, WIDE_SUMS = Tile(64, 64, 64, 4), Tile(128, 64, 64, 8)
"""Of a sum; the wide one on a chip whose tensor cores would wait for the operands of smaller tiles."""
# Examples of a program: of sums, fewer than 2^16; and of factors, with so many columns at a time.
BATCH = tl.constexpr(2048)
EXAMPLES, COLUMNS = 64 if INTERPRETED else 8, 1024 if INTERPRETED else 256

LARGEST = tl.constexpr(float(contributions.LARGEST_FACTOR))
INTEGER = tl.constexpr(1.5 * 2.0**23)
NOT_FINITE = tl.constexpr(0x7F800000)


def add_sums(
    layers: Layers, chosen: Sequence[bool], own: Sequence[tuple[int, int]], longest: Sequence[float],
    *, wide: bool, overwrite: bool,
) -> None:  # fmt: skip
    """Add the chosen layers' sums; `own` are the addresses of weights and sums, `longest` bounds in steps.

    To `overwrite` sums of several batches, clear them before.
    """
    if not any(chosen):
        return
    device, examples, tile = layers.parts.device, layers.parts.examples, WIDE_SUMS if wide else SUMS
    padded = -(-examples // DEPTH.value) * DEPTH.value
    sizes = [
        2 * tile.high * (-(-row.p // tile.high) + -(-row.q // tile.high)) * padded if one else 0
        for row, one in zip(layers.rows, chosen, strict=True)
    ]
    slices = torch.empty(sum(sizes), dtype=torch.int8, device=device)
    places = [slices.data_ptr() + stop - size for stop, size in zip(accumulate(sizes), sizes, strict=True)]
    multiples = tuple(float(contributions.multiple_of(bound)) for bound in longest)
    on_device = numbers(multiples, device, current_stream(device), "float64")
    to_factors = [(weights, place) for (weights, _), place in zip(own, places, strict=True)]
    to_sums = [(out, place) for (_, out), place in zip(own, places, strict=True)]
    shape = {"PADDED": tile.high, "EXAMPLES": EXAMPLES, "COLUMNS": COLUMNS}
    layers.start(_factors_kernel, list(map(int, chosen)), padded // EXAMPLES, to_factors, on_device, examples, **shape)
    tiles = [tile.number(row.p, row.q) * one for row, one in zip(layers.rows, chosen, strict=True)]
    copies = -(-examples // BATCH.value)
    shape = {"OVERWRITE": overwrite and copies == 1, "HIGH": tile.high, "WIDE": tile.wide, "warps": tile.warps}
    layers.start(_sum_kernel, tiles, copies, to_sums, on_device, examples, **shape)


@jit
def stride_of(examples, width, PADDED: tl.constexpr):
    """Return how far the factors of neighboring columns lie apart, and the lower bytes from the upper ones."""
    stride = ((examples + DEPTH - 1) // DEPTH * DEPTH).to(tl.int64)
    return stride, (width + PADDED - 1) // PADDED * PADDED * stride


@kernel("examples")
def _factors_kernel(
    rows, row_of, layers, layer_of, multiples, examples,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, PADDED: tl.constexpr, EXAMPLES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks = (examples + DEPTH - 1) // DEPTH * (DEPTH // EXAMPLES)
    unit = tl.program_id(0) // blocks
    layer = layer_at(unit, layers, layer_of)
    p, q, first, _ = sizes_of(layer)
    example = tl.program_id(0) % blocks * EXAMPLES + tl.arange(0, EXAMPLES)
    inside, position = example < examples, first + example * 0
    weight = tl.load(tl.load(layer + 6).to(tl.pointer_type(tl.float64)) + example, mask=inside, other=0.0)
    weight *= weights_at(rows, row_of, position, inside)
    # A row of an example of weight 0 is not read: what it holds cannot matter, not even NaN.
    used = weight != 0
    a = rows_at(rows, row_of, example.to(tl.int64), position, used, 1, KIND)
    e = rows_at(rows, row_of, example.to(tl.int64), position, used, 4, KIND)
    a_largest = largest_of(a, used, p, ALIGNED, EXAMPLES, COLUMNS)
    e_largest = largest_of(e, used, q, ALIGNED, EXAMPLES, COLUMNS)
    used = used & (a_largest < NOT_FINITE) & (e_largest < NOT_FINITE)
    a_up, e_up = up_of(a_largest), up_of(e_largest)
    a_root = root_of(a, used, p, a_up, ALIGNED, EXAMPLES, COLUMNS)
    e_root = root_of(e, used, q, e_up, ALIGNED, EXAMPLES, COLUMNS)
    # Of 1/2 a coordinate for rounding, and a little for numbers that underflow on the way.
    a_room, e_room = 0.501 * tl.sqrt(p.to(tl.float64)), 0.501 * tl.sqrt(q.to(tl.float64))
    to = tl.multiple_of(tl.load(layer + 7).to(tl.pointer_type(tl.int8)), 16) + example
    stride, lower = stride_of(examples, p, PADDED)
    scale = (1 / (a_root + a_room) * LARGEST).to(tl.float32)
    square = put(a, used, p, a_up, scale, to, stride, lower, ALIGNED, True, EXAMPLES, COLUMNS)
    length = tl.abs(weight) * ((a_root - a_room) * power(-a_up)) * ((e_root - e_room) * power(-e_up))
    length = length / (tl.load(multiples + tl.load(layer_of + unit)) * tl.sqrt(square)) * (1 - 2.0**-20)
    # Not above 0 if it is not a number: of rows of zeros.
    length = tl.where(length > 0, tl.minimum(length, LARGEST), 0.0)
    scale = (tl.where(weight < 0, -length, length) / (e_root + e_room)).to(tl.float32)
    to += 2 * lower
    stride, lower = stride_of(examples, q, PADDED)
    put(e, used, q, e_up, scale, to, stride, lower, ALIGNED, False, EXAMPLES, COLUMNS)


@jit
def numbers_at(at, used, column, width, ALIGNED: tl.constexpr):
    """Return some columns of rows in float32: zeros where they are not `used`."""
    to = at[:, None] + column[None, :]
    if ALIGNED:  # the host has seen it, and loads of 16 bytes need to know
        to, width = tl.multiple_of(to, (1, 16)), width // 8 * 8
    return tl.load(to, mask=used[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)


@jit
def largest_of(at, used, width, ALIGNED: tl.constexpr, EXAMPLES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the bits of each row's largest number in size; a NaN counts as the largest."""
    largest, start = tl.zeros((EXAMPLES, COLUMNS), tl.int32), 0
    while start < width:
        x = numbers_at(at, used, start + tl.arange(0, COLUMNS), width, ALIGNED)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        start += COLUMNS
    return tl.max(largest, axis=1)


@jit
def up_of(largest):
    """Return the exponent of the power of two that brings a row's largest number between 2^21 and 2^22."""
    number = largest.to(tl.float32, bitcast=True)
    low = number < 2.0**-64
    exponent = tl.where(low, number * 2.0**64, number).to(tl.int32, bitcast=True) >> 23
    return 148 - exponent + tl.where(low, 64, 0)


@jit
def power(exponent):
    """Return a power of two in float64."""
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@jit
def relative(x, up):
    """Return rows times their powers of two, in two steps: each is a number of float32."""
    first = up >> 1
    x *= ((first + 127) << 23).to(tl.float32, bitcast=True)[:, None]
    return x * ((up - first + 127) << 23).to(tl.float32, bitcast=True)[:, None]


@jit
def nearest(x):
    """See `dpcore.spec.grid.nearest`; of float32 numbers up to 2^22."""
    return ((x + INTEGER) - INTEGER).to(tl.int32)


@jit
def hashed(x, column):
    """See `dpcore_numpy.slices`."""
    h = x.to(tl.uint32, bitcast=True) ^ (column.to(tl.uint32) * 0x9E3779B1)[None, :]
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return (h >> 8).to(tl.float32) * 2.0**-24


@jit
def root_of(at, used, width, up, ALIGNED: tl.constexpr, EXAMPLES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the root of the squares of each row's integers, whose sum has no rounding."""
    squares, start = tl.zeros((EXAMPLES, COLUMNS), tl.int64), 0
    while start < width:
        x = nearest(relative(numbers_at(at, used, start + tl.arange(0, COLUMNS), width, ALIGNED), up)).to(tl.int64)
        squares += x * x
        start += COLUMNS
    return tl.sqrt(tl.sum(squares, axis=1).to(tl.float64))


@jit
def put(
    at, used, width, up, scale, to, stride, lower,
    ALIGNED: tl.constexpr, NEAREST: tl.constexpr, EXAMPLES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the bytes of integers: rows times `scale`, the nearest or by a hash; return their sums of squares."""
    squares, start = tl.zeros((EXAMPLES, COLUMNS), tl.int32), 0
    while start < width:
        column = start + tl.arange(0, COLUMNS)
        x = relative(numbers_at(at, used, column, width, ALIGNED), up) * scale[:, None]
        if NEAREST:
            x = nearest(x)
        else:
            below = tl.floor(x)
            x = below.to(tl.int32) + (x - below > hashed(x, column)).to(tl.int32)
        squares += x * x
        high = (x + 128) >> 8
        place = to[:, None] + (column * stride)[None, :]
        tl.store(place, high.to(tl.int8), mask=(column < width)[None, :])
        tl.store(place + lower, (x - high * 256).to(tl.int8), mask=(column < width)[None, :])
        start += COLUMNS
    return tl.sum(squares, axis=1).to(tl.float64)


@kernel("examples")
def _sum_kernel(
    rows, row_of, layers, layer_of, multiples, examples,  # noqa: ARG001
    OVERWRITE: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    batches = (examples + BATCH - 1) // BATCH
    unit = tl.program_id(0) // batches
    layer = layer_at(unit, layers, layer_of)
    p, q, _, _ = sizes_of(layer)
    row, column = corners((unit - tl.load(layer)).to(tl.int32), p, HIGH, WIDE)
    begin, slices = tl.program_id(0) % batches * BATCH, tl.load(layer + 7).to(tl.pointer_type(tl.int8))
    stride, a_lower = stride_of(examples, p, HIGH)
    _, e_lower = stride_of(examples, q, HIGH)
    slices = tl.multiple_of(slices, 16)
    a, e = slices + (column * stride)[None, :], slices + 2 * a_lower + (row * stride)[:, None]
    high, middle = tl.zeros((HIGH, WIDE), tl.int32), tl.zeros((HIGH, WIDE), tl.int32)
    low = tl.zeros((HIGH, WIDE), tl.int32)
    for start in range(counted(begin), counted(tl.minimum(begin + BATCH, examples)), DEPTH):
        some = start + tl.arange(0, DEPTH)
        a1, a2 = tl.load(a + some[:, None]), tl.load(a + a_lower + some[:, None])
        e1, e2 = tl.load(e + some[None, :]), tl.load(e + e_lower + some[None, :])
        high = tl.dot(e1, a1, high, out_dtype=tl.int32)
        middle = tl.dot(e1, a2, middle, out_dtype=tl.int32)
        middle = tl.dot(e2, a1, middle, out_dtype=tl.int32)
        low = tl.dot(e2, a2, low, out_dtype=tl.int32)
    whole = (high.to(tl.int64) << 16) + (middle.to(tl.int64) << 8) + low.to(tl.int64)
    inside = (row < q)[:, None] & (column < p)[None, :]
    out = tl.load(layer + 6).to(tl.pointer_type(tl.float64)) + (row.to(tl.int64) * p)[:, None] + column[None, :]
    found = whole.to(tl.float64) * tl.load(multiples + tl.load(layer_of + unit))
    if OVERWRITE:
        tl.store(out, found, mask=inside)
    else:  # other batches add to the same numbers: integers, so that the order makes no difference
        tl.atomic_add(out, found, mask=inside, sem="relaxed")
