"""The norms of per-example vectors."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from dpcore.spec.check_rows import check_rows
from dpcore_triton.described import address, described, pattern, present
from dpcore_triton.kept import Kept
from dpcore_triton.launch import (
    COLUMNS,
    INTERPRETED,
    KINDS,
    ROWS,
    common_device,
    float32_only,
    jit,
    kernel,
    launch,
    read_as_float32,
    rows_of,
    table,
)

Tensor = torch.Tensor
# Examples and coordinates of a program that squares: on the device 16 numbers a thread, all of one row.
SQUARED_ROWS, SQUARED_COLUMNS = (ROWS, COLUMNS) if INTERPRETED else (1, 2048)
# Squares that are added in float32: they are off by 16 roundings of 2^-24 at most, and so the norm by half of that.
RUN, RAISING = tl.constexpr(16), tl.constexpr(1 + 2.0**-20)
Scales = Sequence[Tensor | None] | None


class Norms(NamedTuple):
    """What the two launches take: a function of the blocks' places, their groups and scales."""

    device: torch.device
    rows: Tensor  # of the first
    row_of: Tensor
    parts: int
    groups: Tensor  # of the second
    group_count: int
    kind: Any  # of the rows


_kept = Kept[Norms](64)


def row_norms(rows: Sequence[Tensor], scale: Scales = None) -> Tensor:
    """See `dpcore.spec.ops.Backend.row_norms`."""
    return _norms(rows, None, scale)[0]


def group_norms(rows: Sequence[Tensor], groups: Sequence[int], scale: Scales = None) -> tuple[Tensor, ...]:
    """See `dpcore.spec.ops.Backend.group_norms`."""
    return _norms(rows, groups, scale).unbind()


def _norms(rows: Sequence[Tensor], groups: Sequence[int] | None, scale: Scales) -> Tensor:
    """Return the norms of all groups, (G, B), in two launches.

    Each program writes the float64 sum of squares of its coordinates, a second kernel adds those of an example and a
    group: no atomics, so that the result is the same every time.
    """
    # Blocks seen before are checked by their description: a second look would find the same.
    given = present(scale)
    numbered = groups is None or set(map(type, groups)) == {int}
    asked = len(rows), None if groups is None else tuple(groups), pattern(scale)
    key = described([*rows, *given], *asked) if numbered else None
    made, lent = _kept.get(key), list[Tensor]()
    if made is None:
        check_rows(rows, scale, groups)
        read_as_float32(rows=rows)
        float32_only(scale=given)
        device = common_device(rows=rows[:1])  # and all others are where it is
        made, lent = _made(rows, [0] * len(rows) if groups is None else groups, scale, device)
        if key is not None and not lent:
            _kept.put(key, made)
    examples, device = rows[0].shape[0], made.device
    partial = torch.empty((examples, made.parts), dtype=torch.float64, device=device)
    norms = torch.empty((made.group_count, examples), dtype=torch.float64, device=device)
    programs = -(-examples // SQUARED_ROWS)
    # One axis: the others of a grid end at 65,535, which a large full batch would pass.
    launch(
        _squares_kernel, (made.parts * programs,), device, made.rows, made.row_of, partial, examples,
        SCALED=bool(given), KIND=made.kind, ROWS=SQUARED_ROWS, COLUMNS=SQUARED_COLUMNS,
    )  # fmt: skip
    launch(
        _norms_kernel,
        (made.group_count * -(-examples // ROWS),),
        device,
        made.groups,
        partial,
        norms,
        examples,
        made.parts,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return norms


def _made(
    rows: Sequence[Tensor], groups: Sequence[int], scale: Scales, device: torch.device
) -> tuple[Norms, list[Tensor]]:
    """Return what the launches take, and the copies that it points to, to be kept until they are made."""
    order = sorted(range(len(rows)), key=groups.__getitem__)
    blocks, strides, widths = dense([rows[index] for index in order])
    scales = vectors(scale, order)
    parts_of = [-(-width // SQUARED_COLUMNS) for width in widths]
    columns = [list(map(Tensor.data_ptr, blocks)), strides, widths, list(map(address, scales)), kinds_of(blocks)]
    on_device, row_of, parts = table(np.array(columns, dtype=np.int64).T, parts_of, device)
    parts_of_groups = [0] * (max(groups) + 1)
    for index, own in zip(order, parts_of, strict=True):
        parts_of_groups[groups[index]] += own
    firsts = rows_of([(own,) for own in parts_of_groups], parts_of_groups, device)
    made = Norms(device, on_device, row_of, parts, firsts, len(parts_of_groups), common_kind(blocks))
    return made, copies([*blocks, *scales], [*rows, *(scale or ())])


def dense(rows: Sequence[Tensor]) -> tuple[list[Tensor], list[int], list[int]]:
    """Return blocks as `dense_rows` does, with the distances of their rows, and the rows' lengths."""
    widths = [size[1] for size in map(Tensor.size, rows)]
    blocks = list(rows) if all(map(Tensor.is_contiguous, rows)) else list(map(dense_rows, rows))
    return blocks, [stride[0] for stride in map(Tensor.stride, blocks)], widths


def kinds_of(blocks: Sequence[Tensor]) -> list[int]:
    """Return how the blocks' numbers lie, for `numbers_at`."""
    return [KINDS[block.dtype] for block in blocks]


def common_kind(blocks: Sequence[Tensor]) -> Any:
    """Return the dtype of all blocks, for which a kernel is compiled; None where they differ."""
    dtypes = {block.dtype for block in blocks}
    return getattr(tl, str(dtypes.pop()).removeprefix("torch.")) if len(dtypes) == 1 else None


def copies(used: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the tensors used that are none of those given: copies, which lie elsewhere at the next call."""
    known = set(map(id, given))
    return [tensor for tensor in used if tensor is not None and id(tensor) not in known]


def vectors(vectors: Scales, order: Sequence[int]) -> list[Tensor | None]:
    """Return contiguous vectors in this order, None where there is none."""
    chosen = [None if vectors is None else vectors[index] for index in order]
    return [None if vector is None else contiguous(vector) for vector in chosen]


def contiguous(vector: Tensor) -> Tensor:
    """Return the vector, or a copy without gaps: quickly where it has none."""
    return vector if vector.is_contiguous() else vector.detach().contiguous()


def dense_rows(block: Tensor) -> Tensor:
    """Return the block with neighboring coordinates side by side; its rows may lie apart."""
    return block if block.stride(1) == 1 or block.shape[1] < 2 else block.detach().contiguous()


# Loops over lengths known at launch only are `while` loops: Triton 3.6's interpreter cannot take them as a range's end
# under NumPy 2.4.


@kernel("examples")
def _squares_kernel(
    rows, row_of, partial, examples,
    SCALED: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    groups = (examples + ROWS - 1) // ROWS
    parts, part = tl.num_programs(0) // groups, tl.program_id(0) // groups
    row, columns = locate_columns(part, rows, row_of, 6, COLUMNS)
    example = (tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask = (example < examples)[:, None] & (columns < tl.load(row + 3))[None, :]
    place = example[:, None] * tl.load(row + 2) + columns[None, :]
    values = numbers_at(tl.load(row + 1), tl.load(row + 5), place, mask, KIND)
    if SCALED:
        values = values.to(tl.float64) * scale_at(row + 4, columns, tl.load(row + 3)).to(tl.float64)[None, :]
        squares = tl.sum(values * values, axis=1)
    else:
        squares = squares_of(values, ROWS, COLUMNS)
    tl.store(partial + example * parts + part, squares, mask=example < examples)


@jit
def squares_of(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return each row's sum of squares in float64, of runs that are added in float32, relative to the row's largest.

    Off by `RUN` roundings: of each square, and of fewer additions. Squares that underflow are less than `COLUMNS` times
    2^-126 of the largest, or all are 0.
    """
    exponent = tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    x *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    unit = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float64)
    runs = tl.sum(tl.reshape(x * x, (ROWS, RUN, COLUMNS // RUN)), axis=1)
    return tl.sum(runs.to(tl.float64), axis=1) * (unit * unit)


@jit
def numbers_at(block, kind, place, mask, KIND: tl.constexpr):
    """Return a block's numbers at these places in float32; zeros beside the mask. See `common_kind` for KIND."""
    if KIND is not None:
        found = _numbers_of(block, place, mask, KIND)
    elif kind == 0:
        found = _numbers_of(block, place, mask, tl.float32)
    elif kind == 1:
        found = _numbers_of(block, place, mask, tl.bfloat16)
    else:
        found = _numbers_of(block, place, mask, tl.float16)
    return found


@jit
def _numbers_of(block, place, mask, KIND: tl.constexpr):
    return tl.load(block.to(tl.pointer_type(KIND)) + place, mask=mask, other=0.0).to(tl.float32)


@jit
def scale_at(place, columns, size):
    """Return the scale of `size` numbers whose address stands at `place`; ones where there is none."""
    where = tl.load(place)
    size = tl.where(where != 0, size, 0)
    return tl.load(where.to(tl.pointer_type(tl.float32)) + columns, mask=columns < size, other=1.0)


@jit
def locate_columns(program, rows, row_of, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the address of a program's row of the table, and the coordinates that it works on."""
    row = rows + tl.load(row_of + program).to(tl.int64) * WIDTH
    return row, (program - tl.load(row)) * COLUMNS + tl.arange(0, COLUMNS)


@kernel("examples", "parts")
def _norms_kernel(firsts, partial, norms, examples, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    programs = (examples + ROWS - 1) // ROWS
    group = tl.program_id(0) // programs
    example = (tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    start = tl.load(firsts + group * 2)
    stop = start + tl.load(firsts + group * 2 + 1)
    squares = tl.zeros((ROWS, COLUMNS), tl.float64)
    while start < stop:
        part = start + tl.arange(0, COLUMNS)
        mask = (example < examples)[:, None] & (part < stop)[None, :]
        squares += tl.load(partial + example[:, None] * parts + part[None, :], mask=mask, other=0.0)
        start += COLUMNS
    at = norms + group.to(tl.int64) * examples + example
    tl.store(at, tl.sqrt(tl.sum(squares, axis=1)) * RAISING, mask=example < examples)
