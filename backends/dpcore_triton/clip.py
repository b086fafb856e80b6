"""The clip stage: certified factors, and the weighted sum of per-example vectors."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import triton.language as tl

from dpcore.spec import ops
from dpcore.spec.check_rows import check_combined, check_factors, check_weighted_sum
from dpcore_triton.cores import BATCH, FARTHEST, WORD, words_of
from dpcore_triton.described import address, described, pattern, present
from dpcore_triton.grid import nearest
from dpcore_triton.kept import Kept
from dpcore_triton.launch import (
    COLUMNS,
    INTERPRETED,
    ROWS,
    Table,
    common_device,
    current_stream,
    float32_only,
    jit,
    kernel,
    launch,
    numbers,
    read_as_float32,
    table,
)
from dpcore_triton.row_norms import (
    Scales,
    common_kind,
    contiguous,
    copies,
    dense,
    dense_rows,
    kinds_of,
    locate_columns,
    numbers_at,
    scale_at,
    vectors,
)

Tensor = torch.Tensor

AUTOMATIC_STABILITY = tl.constexpr(ops.AUTOMATIC_STABILITY)
PSAC_STABILITY = tl.constexpr(ops.PSAC_STABILITY)
LEAST_FACTOR, LEADING_BITS = tl.constexpr(ops.LEAST_FACTOR), tl.constexpr(ops.LEADING_BITS)
# Examples of a program that computes factors: one a thread, since a quotient in float64 takes long.
EXAMPLES = COLUMNS // 4
# Examples and coordinates of a program that sums: on the device 8 numbers a thread.
SUMMED_ROWS, SUMMED_COLUMNS = (ROWS, COLUMNS) if INTERPRETED else (1, 1024)
LARGEST = tl.constexpr(float(np.finfo(np.float64).max))


def clip_factors(
    norms: Sequence[Tensor],
    rule: str,
    bounds: Sequence[float],
    sizes: Sequence[int],
    roundings: Sequence[float],
    unit: float,
) -> tuple[Tensor, ...]:
    """See `dpcore.spec.ops.Backend.clip_factors`; `dpcore_numpy.clip` derives the factor.

    The float64 operations and their order are the same, so the weights have the same bits.

    Nothing is read back from the device: the next kernel starts before the host knows the norms.
    """
    check_factors(norms, rule, bounds, sizes, roundings, unit)
    device = common_device(norms=norms)
    groups, examples = len(norms), norms[0].shape[0]
    longest = [1.0 if rule == "normalized" else float(bound) for bound in bounds]
    per_group = [
        (float(bound), 1 + (size + 8) * 2.0**-53, (most - rounding * unit) * (1 - 2.0**-50))
        for bound, size, most, rounding in zip(bounds, sizes, longest, roundings, strict=True)
    ]
    weights = torch.empty((groups, examples), dtype=torch.float64, device=device)
    programs = -(-examples // EXAMPLES)
    numbers_ = numbers((float(unit), *chain.from_iterable(per_group)), device, current_stream(device), "float64")
    launch(
        _factors_kernel, (programs,), device, _stacked(norms), numbers_, weights, groups, examples,
        RULE=rule, EXAMPLES=EXAMPLES,
    )  # fmt: skip
    return weights.unbind()


def _stacked(norms: Sequence[Tensor]) -> Tensor:
    """Return the norms of all groups one after the other: without a copy if `group_norms` made them."""
    first, size = norms[0], norms[0].shape[0] * 8
    if all(own.is_contiguous() and own.data_ptr() == first.data_ptr() + g * size for g, own in enumerate(norms)):
        return first.detach()
    return torch.stack([group.detach() for group in norms])


@kernel("groups", "examples")
def _factors_kernel(norms, numbers, weights, groups, examples, RULE: tl.constexpr, EXAMPLES: tl.constexpr):
    example = tl.program_id(0) * EXAMPLES + tl.arange(0, EXAMPLES)
    mask = example < examples
    finite, at, group = mask, example.to(tl.int64), 0
    while group < groups:
        finite = finite & (tl.abs(tl.load(norms + at, mask=mask, other=0.0)) < float("inf"))
        at += examples
        group += 1
    at, group = example.to(tl.int64), 0
    while group < groups:
        bound, raising = tl.load(numbers + 1 + group * 3), tl.load(numbers + 2 + group * 3)
        lowered = tl.load(numbers + 3 + group * 3)
        raised = tl.load(norms + at, mask=mask, other=0.0) * raising
        factor = factor_of(RULE, raised, bound, lowered)
        weight = tl.minimum(factor / tl.load(numbers), LARGEST)
        weight = (weight.to(tl.int64, bitcast=True) & LEADING_BITS).to(tl.float64, bitcast=True)
        tl.store(weights + at, tl.where(finite & (factor >= LEAST_FACTOR), weight, 0.0), mask=mask)
        at += examples
        group += 1


@jit
def factor_of(RULE: tl.constexpr, raised, bound, lowered):
    """Return the factor for the raised norm and the lowered bound."""
    if RULE == "standard":
        return tl.where(raised <= lowered, 1.0, lowered / raised)
    elif RULE == "automatic":
        return lowered / (raised + AUTOMATIC_STABILITY)
    elif RULE == "psac":
        return lowered / (raised + PSAC_STABILITY / (raised + PSAC_STABILITY))
    elif RULE == "automatic_v":
        return tl.where(raised == 0, 0.0, lowered / raised)
    else:
        return lowered / tl.maximum(raised, bound)


_kept = Kept[tuple[torch.device, Table, Any]](64)


def weighted_sum(
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    out: Sequence[Tensor],
    scale: Scales = None,
    longest: Sequence[float] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """See `dpcore.spec.ops.Backend.weighted_sum`.

    By words of 22 bits (`dpcore_triton.cores.words_of`) where `longest` allows it, and in float64 elsewhere: chips for
    other uses have hardly any.
    """
    # Arrays seen before are checked by their description only. Most groups have the same weights.
    given, different = present(scale), {id(vector): vector for vector in weights}
    number = {place: index for index, place in enumerate(different)}
    weight_of = tuple([number[id(vector)] for vector in weights])
    key = described([*rows, *out, *different.values(), *given], len(rows), len(out), weight_of, pattern(scale))
    made, lent = _kept.get(key), list[Tensor]()
    if made is None:
        check_weighted_sum(rows, weights, out, scale)
        read_as_float32(rows=rows)
        float32_only(scale=given)
        device = common_device(rows=rows[:1])  # the others are on the same device
        sums, lent = _sums(rows, weights, out, scale, device)
        made = device, sums, common_kind(rows)
        if key is not None and not lent:
            _kept.put(key, made)
    device, (on_device, row_of, programs), kind = made
    shape = {"KIND": kind, "OVERWRITE": overwrite, "ROWS": SUMMED_ROWS, "COLUMNS": SUMMED_COLUMNS}
    given_ = (programs,), device, on_device, row_of, rows[0].shape[0]
    if longest is not None and max(longest) <= FARTHEST and not given:
        launch(_words_kernel, *given_, **shape)
    else:
        launch(_sum_kernel, *given_, SCALED=bool(given), **shape)


def _sums(
    rows: Sequence[Tensor], weights: Sequence[Tensor], out: Sequence[Tensor], scale: Scales, device: torch.device
) -> tuple[Table, list[Tensor]]:
    """Return the table of the launch, and the copies that it points to, which must live until the launch."""
    blocks, strides, widths = dense(rows)
    scales = vectors(scale, range(len(rows)))
    factors = {id(vector): contiguous(vector) for vector in weights}
    columns = [
        list(map(Tensor.data_ptr, blocks)), strides, widths, [factors[id(vector)].data_ptr() for vector in weights],
        list(map(Tensor.data_ptr, out)), list(map(address, scales)), kinds_of(blocks),
    ]  # fmt: skip
    made = table(np.array(columns, dtype=np.int64).T, [-(-width // SUMMED_COLUMNS) for width in widths], device)
    return made, copies([*blocks, *factors.values(), *scales], [*rows, *weights, *(scale or ())])


@kernel("examples")
def _sum_kernel(
    rows, row_of, examples,
    SCALED: tl.constexpr, KIND: tl.constexpr, OVERWRITE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, columns = locate_columns(tl.program_id(0), rows, row_of, 8, COLUMNS)
    block, weights, kind = tl.load(row + 1), tl.load(row + 4).to(tl.pointer_type(tl.float64)), tl.load(row + 7)
    stride, inside = tl.load(row + 2), columns < tl.load(row + 3)
    sums, start = tl.zeros((ROWS, COLUMNS), tl.float64), 0
    scale = tl.full((COLUMNS,), 1.0, tl.float32)
    if SCALED:
        scale = scale_at(row + 6, columns, tl.load(row + 3))
    while start < examples:
        example = (start + tl.arange(0, ROWS)).to(tl.int64)
        weight = tl.load(weights + example, mask=example < examples, other=0.0)
        # A row of weight 0 is not read: its entries cannot matter, not even NaN.
        mask = (weight != 0)[:, None] & inside[None, :]
        place = example[:, None] * stride + columns[None, :]
        values = numbers_at(block, kind, place, mask, KIND).to(tl.float64)
        if SCALED:  # under an infinite scale a row that was not read must not become NaN
            values = tl.where(mask, values * scale.to(tl.float64)[None, :], 0.0)
        sums += nearest(weight[:, None] * values)
        start += ROWS
    total = tl.load(row + 5).to(tl.pointer_type(tl.float64)) + columns
    found = tl.sum(sums, axis=0)
    if not OVERWRITE:
        found += tl.load(total, mask=inside, other=0.0)
    tl.store(total, found, mask=inside)


@kernel("examples")
def _words_kernel(
    rows, row_of, examples, KIND: tl.constexpr, OVERWRITE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row, columns = locate_columns(tl.program_id(0), rows, row_of, 8, COLUMNS)
    block, weights, kind = tl.load(row + 1), tl.load(row + 4).to(tl.pointer_type(tl.float64)), tl.load(row + 7)
    stride, inside = tl.load(row + 2), columns < tl.load(row + 3)
    found, start = tl.zeros((COLUMNS,), tl.float64), 0
    while start < examples:
        highs, lows = tl.zeros((ROWS, COLUMNS), tl.int32), tl.zeros((ROWS, COLUMNS), tl.int32)
        stop = tl.minimum(start + BATCH, examples)
        while start < stop:
            example = (start + tl.arange(0, ROWS)).to(tl.int64)
            weight = tl.load(weights + example, mask=example < stop, other=0.0)
            # A row of weight 0 is not read: its entries cannot matter, not even NaN.
            used = weight.to(tl.int64, bitcast=True) != 0
            mask = used[:, None] & inside[None, :]
            values = numbers_at(block, kind, example[:, None] * stride + columns[None, :], mask, KIND)
            up, factor = apart(weight)
            high, low = words_of(values * up[:, None], factor[:, None])
            highs += high
            lows += low
            start += ROWS
        found += tl.sum(highs, axis=0).to(tl.float64) * WORD + tl.sum(lows, axis=0).to(tl.float64)
    total = tl.load(row + 5).to(tl.pointer_type(tl.float64)) + columns
    if not OVERWRITE:
        found += tl.load(total, mask=inside, other=0.0)
    tl.store(total, found, mask=inside)


@jit
def apart(weight):
    """Return a power of two and a number of float32, whose product is the weight, of 24 bits.

    The power is 1 where float32 has the weight. Elsewhere it is as large as float32 has it: a larger weight meets zeros
    only, since the product is bounded, and a smaller one nothing that is rounded to more than 0.
    """
    bits = weight.to(tl.int64, bitcast=True)
    high, mantissa = (bits >> 32).to(tl.int32), (bits >> 29).to(tl.int32) & 0x7FFFFF
    exponent = (high >> 20 & 2047) - 1023
    up = tl.minimum(tl.maximum(exponent - 100, 0), 127) + tl.maximum(tl.minimum(exponent + 100, 0), -126)
    rest = tl.minimum(tl.maximum(exponent - up, -126), 127)
    factor = (high & -(1 << 31)) | (rest + 127) << 23 | mantissa
    return ((up + 127) << 23).to(tl.float32, bitcast=True), factor.to(tl.float32, bitcast=True)


def combine(first: Sequence[Tensor], second: Sequence[Tensor], weights: tuple[float, float]) -> list[Tensor]:
    """See `dpcore.spec.ops.Backend.combine`."""
    check_combined(first, second, weights)
    read_as_float32(first=first, second=second)
    device = common_device(first=first, second=second)
    ones, others = [dense_rows(block) for block in first], [dense_rows(block) for block in second]
    # One allocation for all: blocks of a model lie one after the other.
    sizes = [block.shape[0] * block.shape[1] for block in ones]
    memory = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    found = [part.view(block.shape) for part, block in zip(memory, ones, strict=True)]
    on_device, row_of, parts = table(
        [
            (one.data_ptr(), one.stride(0), other.data_ptr(), other.stride(0), sum_.data_ptr(), one.shape[1], *kinds)
            for one, other, sum_, *kinds in zip(ones, others, found, kinds_of(ones), kinds_of(others), strict=True)
        ],
        [-(-block.shape[1] // COLUMNS) for block in ones],
        device,
    )
    examples = first[0].shape[0]
    grid = (parts * -(-examples // ROWS),)
    numbers_ = tuple(map(float, weights))
    shape = {"KIND": common_kind([*ones, *others]), "ROWS": ROWS, "COLUMNS": COLUMNS}
    launch(_combine_kernel, grid, device, on_device, row_of, examples, *numbers_, **shape)
    return found


@kernel("examples")
def _combine_kernel(
    rows, row_of, examples, first_weight, second_weight,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    programs = (examples + ROWS - 1) // ROWS
    row, columns = locate_columns(tl.program_id(0) // programs, rows, row_of, 9, COLUMNS)
    example = (tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    width, columns = tl.load(row + 6), columns[None, :]
    mask = (example < examples) & (columns < width)
    first = numbers_at(tl.load(row + 1), tl.load(row + 7), example * tl.load(row + 2) + columns, mask, KIND)
    second = numbers_at(tl.load(row + 3), tl.load(row + 8), example * tl.load(row + 4) + columns, mask, KIND)
    found = first_weight * first + second_weight * second
    tl.store(tl.load(row + 5).to(tl.pointer_type(tl.float32)) + example * width + columns, found, mask=mask)
