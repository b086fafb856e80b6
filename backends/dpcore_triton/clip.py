"""The clip stage: norms, certified factors, and the weighted sum of per-example vectors."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl

from dpcore.errors import ArgumentError
from dpcore.spec import ops
from dpcore.spec.check import check_factors, check_rows, check_weighted_sum
from dpcore_triton.launch import COLUMNS, ROWS, common_device, float32_only, jit, kernel, launch, table, upload

Tensor = torch.Tensor

AUTOMATIC_STABILITY = tl.constexpr(ops.AUTOMATIC_STABILITY)
LARGEST = tl.constexpr(float(np.finfo(np.float32).max))
SLACK = tl.constexpr(1 - 2 * float(np.finfo(np.float32).eps))


def row_norms(rows: Sequence[Tensor], scale: Sequence[Tensor] | None = None) -> Tensor:
    """See `dpcore.spec.ops.Backend.row_norms`.

    Each program writes the float64 sum of squares of its coordinates, a second kernel adds those of an example: no
    atomics, so that the result is the same every time.
    """
    check_rows(rows, scale)
    float32_only(rows=rows, scale=scale or ())
    device = common_device(rows=rows, scale=scale or ())
    blocks = [_dense_rows(block) for block in rows]
    scales = [vector.detach().contiguous() for vector in scale or ()]
    examples = rows[0].shape[0]
    on_device, row_of, parts = table(
        [
            (block.data_ptr(), block.stride(0), block.shape[1], scales[index].data_ptr() if scales else 0)
            for index, block in enumerate(blocks)
        ],
        [-(-block.shape[1] // COLUMNS) for block in blocks],
        device,
    )
    partial = torch.empty((examples, parts), dtype=torch.float64, device=device)
    norms = torch.empty(examples, dtype=torch.float64, device=device)
    shape = {"ROWS": ROWS, "COLUMNS": COLUMNS}
    groups = -(-examples // ROWS)
    # One axis: the others of a grid end at 65,535, which a large full batch would pass.
    grid = (parts * groups,)
    launch(_squares_kernel, grid, device, on_device, row_of, partial, examples, SCALED=bool(scales), **shape)
    launch(_norms_kernel, (groups,), device, partial, norms, examples, parts, **shape)
    return norms


def _dense_rows(block: Tensor) -> Tensor:
    """Return the block with neighboring coordinates side by side; its rows may lie apart."""
    block = block.detach()
    return block if block.stride(1) == 1 or block.shape[1] < 2 else block.contiguous()


# Loops over lengths known at launch only are `while` loops: Triton 3.6's interpreter cannot take them as a range's end
# under NumPy 2.4.


@kernel("examples")
def _squares_kernel(
    rows, row_of, partial, examples, SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    groups = (examples + ROWS - 1) // ROWS
    parts, part = tl.num_programs(0) // groups, tl.program_id(0) // groups
    row, columns = locate_columns(part, rows, row_of, 5, COLUMNS)
    example = (tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask = (example < examples)[:, None] & (columns < tl.load(row + 3))[None, :]
    block = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    at = block + example[:, None] * tl.load(row + 2) + columns[None, :]
    values = tl.load(at, mask=mask, other=0.0).to(tl.float64)
    if SCALED:
        scale = tl.load(row + 4).to(tl.pointer_type(tl.float32)) + columns
        values *= tl.load(scale, mask=columns < tl.load(row + 3), other=0.0).to(tl.float64)[None, :]
    squares = tl.sum(values * values, axis=1)
    tl.store(partial + example * parts + part, squares, mask=example < examples)


@jit
def locate_columns(program, rows, row_of, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the address of a program's row of the table, and the coordinates that it works on."""
    row = rows + tl.load(row_of + program).to(tl.int64) * WIDTH
    return row, (program - tl.load(row)) * COLUMNS + tl.arange(0, COLUMNS)


@kernel("examples", "parts")
def _norms_kernel(partial, norms, examples, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    example = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    squares, start = tl.zeros((ROWS, COLUMNS), tl.float64), 0
    while start < parts:
        part = start + tl.arange(0, COLUMNS)
        mask = (example < examples)[:, None] & (part < parts)[None, :]
        squares += tl.load(partial + example[:, None] * parts + part[None, :], mask=mask, other=0.0)
        start += COLUMNS
    tl.store(norms + example, tl.sqrt(tl.sum(squares, axis=1)), mask=example < examples)


def clip_factors(
    norms: Sequence[Tensor], rule: str, bounds: Sequence[float], sizes: Sequence[int], dtype: str
) -> tuple[Tensor, ...]:
    """See `dpcore.spec.ops.Backend.clip_factors`; `dpcore_numpy.clip` derives the factor.

    Nothing is read back from the device: the next kernel is started before the norms are known to the host.
    """
    check_factors(norms, rule, bounds, sizes, dtype)
    if dtype != "float32":
        raise ArgumentError(f"dtype={dtype!r}: must be 'float32' under this backend, or use set_backend('numpy')")
    device = common_device(norms=norms)
    groups, examples = len(norms), norms[0].shape[0]
    stacked = torch.stack([group.detach() for group in norms])
    smallest = float(np.finfo(np.float32).smallest_subnormal)
    numbers = [
        (float(bound), 1 + (size + 8) * 2.0**-53, math.sqrt(size) * smallest)
        for bound, size in zip(bounds, sizes, strict=True)
    ]
    factors = torch.empty((groups, examples), dtype=torch.float32, device=device)
    per_group = upload(np.array(numbers, dtype=np.float64).reshape(-1), device)
    programs = -(-examples // COLUMNS)
    launch(
        _factors_kernel, (programs,), device, stacked, per_group, factors, groups, examples, RULE=rule, EXAMPLES=COLUMNS
    )
    return factors.unbind()


@kernel("groups", "examples")
def _factors_kernel(norms, per_group, factors, groups, examples, RULE: tl.constexpr, EXAMPLES: tl.constexpr):
    example = tl.program_id(0) * EXAMPLES + tl.arange(0, EXAMPLES)
    mask = example < examples
    finite, at, group = mask, example.to(tl.int64), 0
    while group < groups:
        finite = finite & (tl.abs(tl.load(norms + at, mask=mask, other=0.0)) < float("inf"))
        at += examples
        group += 1
    at, group = example.to(tl.int64), 0
    while group < groups:
        bound, raising = tl.load(per_group + group * 3), tl.load(per_group + group * 3 + 1)
        underflow = tl.load(per_group + group * 3 + 2)
        raised = tl.load(norms + at, mask=mask, other=0.0) * raising
        factor = toward_zero(factor_of(RULE, raised, bound, underflow))
        tl.store(factors + at, tl.where(finite, factor, 0.0), mask=mask)
        at += examples
        group += 1


@jit
def factor_of(RULE: tl.constexpr, raised, bound, underflow):
    """Return the factor in float64 for the raised norm."""
    room = (bound - underflow) * SLACK
    if RULE == "standard":
        return tl.where(raised <= bound, 1.0, room / raised)
    elif RULE == "automatic":
        return room / (raised + AUTOMATIC_STABILITY)
    elif RULE == "automatic_v":
        return tl.where(raised == 0, 0.0, room / raised)
    else:
        return (1 - underflow) * SLACK / tl.maximum(raised, bound)


@jit
def toward_zero(factor):
    """Return the nearest float32 that is not above `factor`, within 0 and the largest float32."""
    factor = tl.minimum(tl.maximum(factor, 0.0), LARGEST)
    rounded = factor.to(tl.float32)
    below = (rounded.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    return tl.where(rounded.to(tl.float64) > factor, below, rounded)


def weighted_sum(rows: Sequence[Tensor], weights: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """See `dpcore.spec.ops.Backend.weighted_sum`."""
    check_weighted_sum(rows, weights, out)
    float32_only(rows=rows)
    device = common_device(rows=rows, weights=weights, out=out)
    blocks = [_dense_rows(block) for block in rows]
    factors = [vector.detach().contiguous() for vector in weights]
    on_device, row_of, programs = table(
        [
            (block.data_ptr(), block.stride(0), block.shape[1], factor.data_ptr(), total.data_ptr())
            for block, factor, total in zip(blocks, factors, out, strict=True)
        ],
        [-(-block.shape[1] // COLUMNS) for block in blocks],
        device,
    )
    examples = rows[0].shape[0]
    launch(_sum_kernel, (programs,), device, on_device, row_of, examples, ROWS=ROWS, COLUMNS=COLUMNS)


@kernel("examples")
def _sum_kernel(rows, row_of, examples, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, columns = locate_columns(tl.program_id(0), rows, row_of, 6, COLUMNS)
    block, weights = tl.load(row + 1).to(tl.pointer_type(tl.float32)), tl.load(row + 4).to(tl.pointer_type(tl.float32))
    stride, inside = tl.load(row + 2), columns < tl.load(row + 3)
    sums, start = tl.zeros((ROWS, COLUMNS), tl.float64), 0
    while start < examples:
        example = (start + tl.arange(0, ROWS)).to(tl.int64)
        weight = tl.load(weights + example, mask=example < examples, other=0.0)
        # A row of weight 0 is not read: what it holds cannot matter, not even NaN.
        mask = (weight != 0)[:, None] & inside[None, :]
        at = block + example[:, None] * stride + columns[None, :]
        sums += weight.to(tl.float64)[:, None] * tl.load(at, mask=mask, other=0.0).to(tl.float64)
        start += ROWS
    total = tl.load(row + 5).to(tl.pointer_type(tl.float64)) + columns
    tl.store(total, tl.load(total, mask=inside, other=0.0) + tl.sum(sums, axis=0), mask=inside)
