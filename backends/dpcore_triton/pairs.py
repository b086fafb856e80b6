"""What the operations on pairs share: parts as one table, and the certified norm."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl

from dpcore_triton.launch import COLUMNS, ROWS, jit, kernel, launch, rows_of, table

Tensor = torch.Tensor

# Rows and columns of a tile of a gradient, positions of a block of inner products, and what one `tl.dot` adds up.
SIDE, POSITIONS, DEPTH = 32, 16, 16
# Numbers of a row, of `ROWS`, that are added up at a time.
WIDTH = COLUMNS // 4
UNIT = 2.0**-53
FAR = 400  # of exponents
FIELDS = tl.constexpr(9)


class Parts(NamedTuple):
    """The parts of a tensor: where the row of each position in the concatenated time lies, and its weight."""

    device: torch.device
    examples: int
    total: int  #: T, the sum of T_j
    rows: Tensor  #: of a part: first position, address and strides (example, time) of inputs and gradients, weight, T_j
    row_of: Tensor  #: the part of each position
    kept: Sequence[Tensor]  #: what the addresses point into

    def empty(self, width: int) -> Tensor:
        """Return float64 memory for so many numbers of each example."""
        return torch.empty((self.examples, width), dtype=torch.float64, device=self.device)


def dense(arrays: Sequence[Tensor], *, halves: bool = False) -> list[Tensor]:
    """Return arrays whose last axis has no gaps, the others any strides; in float32, unless `halves` are read."""
    found = [array.detach() if halves else array.detach().float() for array in arrays]
    return [array if array.stride(-1) == 1 or array.shape[-1] < 2 else array.contiguous() for array in found]


def parts_of(
    inputs: Sequence[Tensor] | None, gradients: Sequence[Tensor], weights: Sequence[float], device: torch.device,
    exponents: Sequence[int], *, halves: bool = False,
) -> Parts:  # fmt: skip
    """Put the parts' addresses, and the weight of each times ``2 ** -exponent``, on `device`."""
    es = dense(gradients, halves=halves)
    inputs_ = [None] * len(es) if inputs is None else dense(inputs, halves=halves)
    rows = [
        (
            *((0, 0, 0) if a is None else (a.data_ptr(), a.stride(0), a.stride(1))),
            *(e.data_ptr(), e.stride(0), e.stride(1)),
            bits(math.ldexp(weight, -exponent)),
            e.shape[1],
        )
        for a, e, weight, exponent in zip(inputs_, es, weights, exponents, strict=True)
    ]
    on_device, row_of, total = table(rows, [e.shape[1] for e in es], device)
    kept = [*es, *(a for a in inputs_ if a is not None)]
    return Parts(device, es[0].shape[0], total, on_device, row_of, kept)


def exponent_of(weights: Sequence[float]) -> int:
    """Return the exponent that brings the largest weight into [1, 2)."""
    largest = max(map(abs, weights))
    return math.frexp(largest)[1] - 1 if largest else 0


def far_exponent_of(weights: Sequence[float]) -> int:
    """Return `exponent_of` of weights so large or small that products with an example's may leave float64; else 0."""
    exponent = exponent_of(weights)
    return exponent if abs(exponent) > FAR else 0


def lifted(weights: Tensor, exponent: int) -> Tensor:
    """Return examples' weights times ``2 ** exponent``, which their point weights lack, of 2^800 in size at most.

    They are finite, and stay so times numbers of float32, since a product with a row of zeros must be 0. No vector but
    0 has a larger one, or an addend would be longer than 2^53. Ordinary weights take no launch.
    """
    given = weights.detach()
    return (given if exponent == 0 else (given * 2.0**exponent).clamp(-(2.0**800), 2.0**800)).contiguous()


def bits(value: float) -> int:
    """Return the bits of a float64 as a signed integer, for a table."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


class Bound(NamedTuple):
    """How a certified norm follows from computed numbers: ``raising sqrt(max(Q, 0) + inner S^2) + outer S + under``.

    It is infinite where S is at least `limit`. What follows is for float64 products; `dpcore_triton.cores` has others.

    Notes
    -----
    Let v be an example's vector, the sum of T terms; S the sum of their norms, Q the computed ``|v|^2``, u = 2^-53. A
    coordinate of v~, what a sum rounds to an integer for v, is the sum of T products in float64, in any order, times
    scale and weight: at most T + 4 roundings of numbers that are the sizes of the terms' coordinates. So ``||v~ - v||
    <= (T + 4) u S``.
    Where Q adds squares it is that of a v computed like v~, which is as far from v. Hence `outer`: twice that.

    `inner` is the rounding of a Q whose terms have both signs (the additions of an inner product and of a Q, any
    order), by Cauchy's inequality relative to ``S^2``; `raising` that of a Q that adds squares, and of N itself. All
    three are doubled, for S is rounded as well, by less than half.

    The last term is for underflow. Weights are scaled by a power of two, so that the largest lies in [1, 2). Then a
    weight times a number of float32 loses at most 2^-1075. It is multiplied by three more such numbers at most (with
    a weight, below 2^129, 2^128, 2^128) and added to at most T^2 p q others in Q: together less than
    ``T^2 p q 2^-687``, whose root is below 2^-300 for ``T^2 p q < 2^86``. Everything else that underflows is smaller.
    """

    inner: float
    outer: float
    raising: float
    under: float = 2.0**-300
    limit: float = math.inf


def bound(total: int, *, signed: int = 0, squares: int = 0) -> Bound:
    """Return the constants for T = `total`, and so many roundings of a `signed` Q or of a Q of `squares`."""
    return Bound(2 * signed * UNIT, 4 * (total + 4) * UNIT, 1 + 2 * (squares + 16) * UNIT)


class Sum(NamedTuple):
    """One vector of each example: how N follows, and where what adds up to Q and to S lies, in numbers an example."""

    chosen: Bound
    exponent: int  #: of its weights
    squares: int  #: where its numbers begin, behind those of vectors before it
    squares_width: int
    lengths: int
    lengths_width: int


def norms_of(parts: Parts, sums: Sequence[Sum], squares: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """Return N of each example, for each vector; a vector's numbers are one array (B, width) after the other."""
    norms = torch.empty((len(sums), parts.examples), dtype=torch.float64, device=parts.device)
    rows = [(*map(bits, (*own.chosen, 2.0**own.exponent)), *own[2:]) for own in sums]
    launch(
        _bounds_kernel, (len(sums) * -(-parts.examples // ROWS),), parts.device,
        rows_of(rows, [1] * len(rows), parts.device), squares, lengths, norms, parts.examples,
        ROWS=ROWS, COLUMNS=WIDTH,
    )  # fmt: skip
    return norms.unbind()


def norm_of(parts: Parts, chosen: Bound, exponent: int, squares: Tensor, lengths: Tensor) -> Tensor:
    """Return N of one vector of each example, from (B, any number) and (B, any number)."""
    (norms,) = norms_of(parts, [Sum(chosen, exponent, 0, squares.shape[1], 0, lengths.shape[1])], squares, lengths)
    return norms


@kernel("examples")
def _bounds_kernel(numbers, squares, lengths, norms, examples, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    groups = (examples + ROWS - 1) // ROWS
    vector = (tl.program_id(0) // groups).to(tl.int64)
    row = numbers + vector * 11
    example = (tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inner, outer, raising = number(row, 1), number(row, 2), number(row, 3)
    terms = added(lengths, row + 9, example, examples, ROWS, COLUMNS)
    square = tl.maximum(added(squares, row + 7, example, examples, ROWS, COLUMNS), 0.0)
    # A maximum may drop a NaN; S, which every factor of a product enters, brings it back.
    norm = raising * tl.sqrt(square + inner * terms * terms) + outer * terms + number(row, 4)
    norm = tl.where(terms < number(row, 5), norm, float("inf"))
    tl.store(norms + (vector * examples + example), norm * number(row, 6), mask=example < examples)


@jit
def number(numbers, FIELD: tl.constexpr):
    """Return a float64 of a table."""
    return tl.load(numbers + FIELD).to(tl.float64, bitcast=True)


@jit
def added(array, place, example, examples, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of each example's numbers, as many and where `place` says."""
    width = tl.load(place + 1).to(tl.int32)
    array += tl.load(place) * examples
    sums, start = tl.zeros((ROWS, COLUMNS), tl.float64), 0
    while start < width:
        column = start + tl.arange(0, COLUMNS)
        mask = (example < examples)[:, None] & (column < width)[None, :]
        sums += tl.load(array + example[:, None] * width + column[None, :], mask=mask, other=0.0)
        start += COLUMNS
    return tl.sum(sums, axis=1)


@jit
def rows_at(rows, row_of, example, position, mask, FIELD: tl.constexpr, KIND: tl.constexpr = tl.float32):
    """Return where the rows of these examples and positions begin: of inputs (FIELD 1) or gradients (FIELD 4)."""
    part = rows + tl.load(row_of + position, mask=mask, other=0).to(tl.int64) * FIELDS
    time = position - tl.load(part)
    at = example * tl.load(part + FIELD + 1) + time * tl.load(part + FIELD + 2)
    return tl.load(part + FIELD).to(tl.pointer_type(KIND)) + at


@jit
def weights_at(rows, row_of, position, mask):
    """Return the point weights of these positions."""
    part = rows + tl.load(row_of + position, mask=mask, other=0).to(tl.int64) * FIELDS
    return tl.load(part + 7).to(tl.float64, bitcast=True)


@jit
def dot(first, second, total):
    """Return `total` plus a product in float64: of what were float32 numbers, exact before it is added."""
    return tl.dot(first, second, total, input_precision="ieee", out_dtype=tl.float64)
