"""Gradients of embeddings, as pairs of indices and output gradients: certified norms, weighted sums."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from dpcore.spec.check_pairs import check_embedding, check_sum
from dpcore_triton.grid import nearest
from dpcore_triton.launch import COLUMNS, ROWS, common_device, float32_only, jit, kernel, launch, read_as_float32
from dpcore_triton.pairs import WIDTH, Parts, bound, exponent_of, norm_of, parts_of, rows_at, weights_at

Tensor = torch.Tensor


def embedding_norms(
    indices: Sequence[Tensor],
    gradients: Sequence[Tensor],
    point_weights: Sequence[float],
    size: int,
    *,
    scale: Tensor | None = None,
) -> Tensor:
    """See `dpcore.spec.pair_ops.PairOperations.embedding_norms`.

    Each example's positions are sorted by token. A program goes over them for some columns, adds up the gradients of a
    token and squares the sum.
    """
    check_embedding(indices, gradients, point_weights, size, scale)
    scales = () if scale is None else (scale,)
    read_as_float32(gradients=gradients)
    float32_only(scale=scales)
    device = common_device(indices=indices, gradients=gradients, scale=scales)
    exponent = exponent_of(point_weights)
    parts = parts_of(None, gradients, point_weights, device, [exponent] * len(gradients))
    squares, lengths = tokens_of(parts, joined(indices), gradients[0].shape[2], size, scale)
    chosen = bound(parts.total, squares=parts.total + COLUMNS + squares.shape[1])
    return norm_of(parts, chosen, exponent, squares, lengths)


def embedding_sum(
    indices: Sequence[Tensor],
    gradients: Sequence[Tensor],
    point_weights: Sequence[float],
    weights: Tensor,
    out: Tensor,
    *,
    scale: Tensor | None = None,
) -> None:
    """See `dpcore.spec.pair_ops.PairOperations.embedding_sum`.

    All positions of the batch are sorted by token, and within a token by example. The program at a token's first
    position adds up the whole token, example by example: the rows of one are added and rounded to integers before they
    meet another's. The others have nothing to do.
    """
    width = gradients[0].shape[2]
    size = out.shape[0] // max(1, width)
    check_embedding(indices, gradients, point_weights, size, scale)
    check_sum(indices[0].shape[0], size * width, weights, out)
    scales = () if scale is None else (scale,)
    read_as_float32(gradients=gradients)
    float32_only(scale=scales)
    device = common_device(indices=indices, gradients=gradients, weights=[weights], out=[out], scale=scales)
    parts = parts_of(None, gradients, point_weights, device, [0] * len(gradients))
    tokens, order = torch.sort(joined(indices).reshape(-1), stable=True)
    launch(
        _sum_kernel, (tokens.numel() * -(-width // COLUMNS),), device, parts.rows, parts.row_of, tokens, order,
        weights.detach().contiguous(), out if scale is None else scale.detach().contiguous(), out,
        tokens.numel(), width, parts.total, size, SCALED=scale is not None, COLUMNS=COLUMNS,
    )  # fmt: skip


def joined(indices: Sequence[Tensor]) -> Tensor:
    """Return the tokens of all positions: (B, T)."""
    return torch.cat([part.detach() for part in indices], dim=1)


def tokens_of(parts: Parts, index: Tensor, width: int, size: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return sums of squares of v (B, blocks of columns), and the norms of its terms (B, T)."""
    tokens, order = torch.sort(index, dim=1, stable=True)
    squares, lengths = parts.empty(-(-width // COLUMNS)), parts.empty(parts.total)
    scales = squares if scale is None else scale.detach().contiguous()
    scaled, count = scale is not None, lengths.numel()
    launch(
        _tokens_kernel, (squares.numel(),), parts.device, parts.rows, parts.row_of, tokens, order, scales, squares,
        width, parts.total, size, SCALED=scaled, COLUMNS=COLUMNS,
    )  # fmt: skip
    launch(
        _lengths_kernel, (-(-count // ROWS),), parts.device, parts.rows, parts.row_of, index, scales, lengths, count,
        width, parts.total, size, SCALED=scaled, ROWS=ROWS, COLUMNS=WIDTH,
    )  # fmt: skip
    return squares, lengths


@kernel("width", "total", "size")
def _tokens_kernel(
    rows, row_of, tokens, order, scale, squares, width, total, size, SCALED: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    chunks = (width + COLUMNS - 1) // COLUMNS
    example, column = tl.program_id(0) // chunks, tl.program_id(0) % chunks * COLUMNS + tl.arange(0, COLUMNS)
    first, position = example.to(tl.int64) * total, 0
    v, square = tl.zeros((COLUMNS,), tl.float64), tl.zeros((COLUMNS,), tl.float64)
    while position < total:
        token, spot = tl.load(tokens + first + position), tl.load(order + first + position)
        # No columns of a token that is none. (The interpreter cannot mask by a vector and a scalar.)
        used = column < tl.where((token >= 0) & (token < size), width, 0)
        v += gradient_at(rows, row_of, example, spot, column, used)
        position += 1
        if tl.load(tokens + first + position, mask=position < total, other=-1) != token:
            if SCALED:
                v *= tl.load(scale + (token * width + column), mask=used, other=0.0).to(tl.float64)
            square += v * v
            v = tl.zeros((COLUMNS,), tl.float64)
    tl.store(squares + tl.program_id(0), tl.sum(square, axis=0))


@kernel("count", "width", "total", "size")
def _lengths_kernel(
    rows, row_of, index, scale, lengths, count, width, total, size,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    term = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask, position = term < count, term % total
    token = tl.load(index + term, mask=mask, other=-1)
    used, at = (token >= 0) & (token < size), rows_at(rows, row_of, term // total, position, mask, 4)
    sums, start = tl.zeros((ROWS, COLUMNS), tl.float64), 0
    while start < width:
        column = start + tl.arange(0, COLUMNS)
        inside = used[:, None] & (column < width)[None, :]
        value = tl.load(at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float64)
        if SCALED:
            to = scale + (token[:, None] * width + column[None, :])
            value *= tl.load(to, mask=inside, other=0.0).to(tl.float64)
        sums += value * value
        start += COLUMNS
    length = tl.abs(weights_at(rows, row_of, position, mask)) * tl.sqrt(tl.sum(sums, axis=1))
    tl.store(lengths + term, length, mask=mask)


@jit
def gradient_at(rows, row_of, example, position, column, used):
    """Return some columns of the gradient at one position, times its point weight."""
    at = rows_at(rows, row_of, example, position, position >= 0, 4) + column
    return tl.load(at, mask=used, other=0.0).to(tl.float64) * weights_at(rows, row_of, position, position >= 0)


@kernel("count", "width", "total", "size")
def _sum_kernel(
    rows, row_of, tokens, order, weights, scale, out, count, width, total, size,
    SCALED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chunks = (width + COLUMNS - 1) // COLUMNS
    position, column = tl.program_id(0) // chunks, tl.program_id(0) % chunks * COLUMNS + tl.arange(0, COLUMNS)
    token, before = tl.load(tokens + position), tl.load(tokens + position - 1, mask=position > 0, other=-1)
    if (token != before) & (token >= 0) & (token < size):
        at, inside, end = token * width + column, column < width, position
        # Found before, since Triton 3.6 cannot compile a loop over vectors that ends by what it loads.
        while tl.load(tokens + end, mask=end < count, other=-1) == token:
            end += 1
        sums, v = tl.zeros((COLUMNS,), tl.float64), tl.zeros((COLUMNS,), tl.float64)
        while position < end:
            spot = tl.load(order + position)
            example = spot // total
            weight = tl.load(weights + example)
            # An example of weight 0 is not read: what it holds cannot matter, not even NaN.
            used = column < tl.where(weight != 0, width, 0)
            v += gradient_at(rows, row_of, example, spot - example * total, column, used)
            position += 1
            following = tl.load(order + position, mask=position < end, other=0) // total
            if (position == end) | (following != example):
                if SCALED:
                    v *= tl.load(scale + at, mask=used, other=0.0).to(tl.float64)
                sums += nearest(weight * v)
                v = tl.zeros((COLUMNS,), tl.float64)
        tl.store(out + at, tl.load(out + at, mask=inside, other=0.0) + sums, mask=inside)
