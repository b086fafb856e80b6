"""Gradients of embeddings, as pairs of indices and output gradients: certified norms, weighted sums."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from dpcore.spec.check_pairs import check_embedding, check_sum
from dpcore_triton.grid import nearest
from dpcore_triton.launch import ROWS, common_device, float32_only, jit, kernel, launch, read_as_float32
from dpcore_triton.pairs import (
    WIDTH,
    Parts,
    bound,
    exponent_of,
    far_exponent_of,
    lifted,
    norm_of,
    parts_of,
    rows_at,
    weights_at,
)

Tensor = torch.Tensor

# Columns of a program at most.
TOKEN_COLUMNS = 256


def tile_of(total: int, size: int) -> dict[str, int]:
    """Return how many positions of a token a program adds up together, and columns: both from public sizes.

    A token of a table with fewer rows than an example has positions comes often, one of a larger table a few times.
    """
    positions = 16 if total > size else 4
    return {"POSITIONS": positions, "COLUMNS": 4 * TOKEN_COLUMNS // positions}


def embedding_norms(
    indices: Sequence[Tensor],
    gradients: Sequence[Tensor],
    point_weights: Sequence[float],
    size: int,
    *,
    scale: Tensor | None = None,
) -> Tensor:
    """See `dpcore.spec.pair_ops.PairOperations.embedding_norms`.

    Each example's positions are sorted by token. The program at a token's first position adds up the gradients of the
    example's token for some columns, and squares the sum; the others have nothing to do.
    """
    check_embedding(indices, gradients, point_weights, size, scale)
    scales = () if scale is None else (scale,)
    read_as_float32(gradients=gradients)
    float32_only(scale=scales)
    device = common_device(indices=indices, gradients=gradients, scale=scales)
    exponent = exponent_of(point_weights)
    parts = parts_of(None, gradients, point_weights, device, [exponent] * len(gradients))
    squares, lengths = tokens_of(parts, joined(indices), gradients[0].shape[2], size, scale)
    chosen = bound(parts.total, squares=TOKEN_COLUMNS + squares.shape[1])
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

    The programs are those of the norms. Each rounds its sum to integers, so that the examples' sums of a token may meet
    in any order.
    """
    width = gradients[0].shape[2]
    size = out.shape[0] // max(1, width)
    check_embedding(indices, gradients, point_weights, size, scale)
    check_sum(indices[0].shape[0], size * width, weights, out)
    scales = () if scale is None else (scale,)
    read_as_float32(gradients=gradients)
    float32_only(scale=scales)
    device = common_device(indices=indices, gradients=gradients, weights=[weights], out=[out], scale=scales)
    exponent = far_exponent_of(point_weights)
    parts = parts_of(None, gradients, point_weights, device, [exponent] * len(gradients))
    tokens, order = torch.sort(joined(indices), dim=1, stable=True)
    tile = tile_of(parts.total, size)
    launch(
        _sum_kernel, (tokens.numel() * -(-width // tile["COLUMNS"]),), device, parts.rows, parts.row_of, tokens, order,
        lifted(weights, exponent), out if scale is None else scale.detach().contiguous(), out,
        width, parts.total, size, SCALED=scale is not None, **tile,
    )  # fmt: skip


def joined(indices: Sequence[Tensor]) -> Tensor:
    """Return the tokens of all positions: (B, T)."""
    return torch.cat([part.detach() for part in indices], dim=1)


def tokens_of(parts: Parts, index: Tensor, width: int, size: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return sums of squares of v (B, positions times blocks of columns), and the norms of its terms (B, T)."""
    tokens, order = torch.sort(index, dim=1, stable=True)
    tile = tile_of(parts.total, size)
    squares, lengths = parts.empty(parts.total * -(-width // tile["COLUMNS"])), parts.empty(parts.total)
    scales = squares if scale is None else scale.detach().contiguous()
    scaled, count = scale is not None, lengths.numel()
    launch(
        _tokens_kernel, (squares.numel(),), parts.device, parts.rows, parts.row_of, tokens, order, scales, squares,
        width, parts.total, size, SCALED=scaled, **tile,
    )  # fmt: skip
    launch(
        _lengths_kernel, (-(-count // ROWS),), parts.device, parts.rows, parts.row_of, index, scales, lengths, count,
        width, parts.total, size, SCALED=scaled, ROWS=ROWS, COLUMNS=WIDTH,
    )  # fmt: skip
    return squares, lengths


@kernel("width", "total", "size")
def _tokens_kernel(
    rows, row_of, tokens, order, scale, squares, width, total, size,
    SCALED: tl.constexpr, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    example, position, column = place_of(width, total, COLUMNS)
    token, end = run_at(tokens, example, position, total, size, POSITIONS)
    v = sum_of(rows, row_of, tokens, order, example, token, position, end, column, width, total, POSITIONS, COLUMNS)
    if SCALED:
        used = column < tl.where(end > position, width, 0)
        v *= tl.load(scale + (token * width + column), mask=used, other=0.0).to(tl.float64)
    tl.store(squares + tl.program_id(0), tl.sum(v * v, axis=0))


@jit
def place_of(width, total, COLUMNS: tl.constexpr):
    """Return a program's example, its position among the sorted ones, and its columns."""
    chunks = (width + COLUMNS - 1) // COLUMNS
    place = tl.program_id(0) // chunks
    column = tl.program_id(0) % chunks * COLUMNS + tl.arange(0, COLUMNS)
    return (place // total).to(tl.int64), place % total, column


@jit
def run_at(tokens, example, position, total, size, POSITIONS: tl.constexpr):
    """Return the token at a position, and where its blocks of positions end: nowhere if it began before, or is none."""
    own = tokens + example * total
    token, before = tl.load(own + position), tl.load(own + position - 1, mask=position > 0, other=-1)
    first = (token != before) & (token >= 0) & (token < size)
    token, end = tl.where(first, token, 0), tl.where(first, position + POSITIONS, position)
    # Found before, since Triton 3.6 cannot compile a loop over vectors that ends by what it loads.
    while tl.load(own + end, mask=first & (end < total), other=-1) == token:
        end += POSITIONS
    return token, end


@jit
def sum_of(
    rows, row_of, tokens, order, example, token, position, end, column, width, total,
    POSITIONS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return some columns of an example's sum over the positions of a token, which lie between two sorted ones."""
    first, sums = example * total, tl.zeros((POSITIONS, COLUMNS), tl.float64)
    while position < end:
        place = position + tl.arange(0, POSITIONS)
        mask = tl.load(tokens + first + place, mask=place < total, other=-1) == token
        spot = tl.load(order + first + place, mask=mask, other=0)
        at, inside = rows_at(rows, row_of, example, spot, mask, 4), mask[:, None] & (column < width)[None, :]
        values = tl.load(at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float64)
        sums += values * weights_at(rows, row_of, spot, mask)[:, None]
        position += POSITIONS
    return tl.sum(sums, axis=0)


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


@kernel("width", "total", "size")
def _sum_kernel(
    rows, row_of, tokens, order, weights, scale, out, width, total, size,
    SCALED: tl.constexpr, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    example, position, column = place_of(width, total, COLUMNS)
    token, end = run_at(tokens, example, position, total, size, POSITIONS)
    weight = tl.load(weights + example)
    # An example of weight 0 is not read: what it holds cannot matter, not even NaN.
    if (end > position) & (weight != 0):
        v = sum_of(rows, row_of, tokens, order, example, token, position, end, column, width, total, POSITIONS, COLUMNS)
        at, inside = token * width + column, column < width
        if SCALED:
            v *= tl.load(scale + at, mask=inside, other=0.0).to(tl.float64)
        # Other examples add to the same numbers. These are integers, so that the order makes no difference.
        tl.atomic_add(out + at, nearest(weight * v), mask=inside, sem="relaxed")
