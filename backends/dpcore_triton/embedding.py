"""Gradients of embeddings, and of matrices tied to one: certified norms, weighted sums."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from dpcore.spec.check_pairs import check_embedding, check_linear, check_sum
from dpcore_triton.gram import gram_of, inner_products, lengths_of, signed_roundings
from dpcore_triton.launch import COLUMNS, common_device, float32_only, jit, kernel, launch
from dpcore_triton.pairs import DEPTH, SIDE, Parts, bound, exponent_of, norms_of, parts_of, rows_at, weights_at

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
    float32_only(gradients=gradients, scale=scales)
    device = common_device(indices=indices, gradients=gradients, scale=scales)
    parts = parts_of(None, gradients, point_weights, device, exponent_of(point_weights))
    squares, sizes = _tokens_of(parts, joined(indices), gradients[0].shape[2], size, scale)
    chosen = bound(parts.total, squares=parts.total + COLUMNS + squares.shape[1])
    return norms_of(parts, chosen, squares, sizes=sizes)


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
    position adds up the whole token, example by example; the others have nothing to do.
    """
    width = gradients[0].shape[2]
    size = max(1, out.shape[0] // max(1, width))
    check_embedding(indices, gradients, point_weights, size, scale)
    check_sum(indices[0].shape[0], size * width, weights, out)
    scales = () if scale is None else (scale,)
    float32_only(gradients=gradients, scale=scales)
    device = common_device(indices=indices, gradients=gradients, weights=[weights], out=[out], scale=scales)
    parts = parts_of(None, gradients, point_weights, device)
    tokens, order = torch.sort(joined(indices).reshape(-1), stable=True)
    launch(
        _sum_kernel, (tokens.numel() * -(-width // COLUMNS),), device, parts.rows, parts.row_of, tokens, order,
        weights.detach().contiguous(), out if scale is None else scale.detach().contiguous(), out,
        tokens.numel(), width, parts.total, size, SCALED=scale is not None, COLUMNS=COLUMNS,
    )  # fmt: skip


def tied_norms(
    indices: Sequence[Tensor],
    token_gradients: Sequence[Tensor],
    token_weights: Sequence[float],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    point_weights: Sequence[float],
    size: int,
    *,
    exact: bool = False,  # noqa: ARG001
) -> Tensor:
    """See `dpcore.spec.pair_ops.PairOperations.tied_norms`; everything is float64, and `exact` changes nothing."""
    check_embedding(indices, token_gradients, token_weights, size)
    check_linear(inputs, gradients, point_weights)
    arrays = {"token_gradients": token_gradients, "inputs": inputs, "gradients": gradients}
    float32_only(**arrays)
    device = common_device(indices=indices, **arrays)
    exponent, p = exponent_of([*token_weights, *point_weights]), inputs[0].shape[2]
    tokens = parts_of(None, token_gradients, token_weights, device, exponent)
    parts = parts_of(inputs, gradients, point_weights, device, exponent)
    index = joined(indices)
    embedding, sizes = _tokens_of(tokens, index, p, size, None)
    blocks = -(-tokens.total // SIDE)
    crossed = torch.empty((parts.examples, blocks), dtype=torch.float64, device=device)
    launch(
        _cross_kernel, (crossed.numel(),), device, tokens.rows, tokens.row_of, index, parts.rows, parts.row_of,
        crossed, p, tokens.total, parts.total, size, SIDE=SIDE, DEPTH=DEPTH,
    )  # fmt: skip
    squares = torch.cat([embedding, gram_of(parts, p, size), crossed], dim=1)
    signed = signed_roundings(parts, p, size) + tokens.total + COLUMNS + squares.shape[1]
    chosen = bound(tokens.total + parts.total, signed=signed)
    return norms_of(parts, chosen, squares, lengths_of(parts, p, size), sizes)


def joined(indices: Sequence[Tensor]) -> Tensor:
    """Return the tokens of all positions: (B, T)."""
    return torch.cat([part.detach() for part in indices], dim=1)


def _tokens_of(parts: Parts, index: Tensor, width: int, size: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return sums of squares of v, and of the sizes of its terms: (B, blocks of columns) each."""
    tokens, order = torch.sort(index, dim=1, stable=True)
    squares = torch.empty((parts.examples, -(-width // COLUMNS)), dtype=torch.float64, device=parts.device)
    sizes = torch.empty_like(squares)
    launch(
        _tokens_kernel, (squares.numel(),), parts.device, parts.rows, parts.row_of, tokens, order,
        squares if scale is None else scale.detach().contiguous(), squares, sizes, width, parts.total, size,
        SCALED=scale is not None, COLUMNS=COLUMNS,
    )  # fmt: skip
    return squares, sizes


@kernel("width", "total", "size")
def _tokens_kernel(
    rows, row_of, tokens, order, scale, squares, sizes, width, total, size, SCALED: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    chunks = (width + COLUMNS - 1) // COLUMNS
    example, column = tl.program_id(0) // chunks, tl.program_id(0) % chunks * COLUMNS + tl.arange(0, COLUMNS)
    first, position = example.to(tl.int64) * total, 0
    v, terms = tl.zeros((COLUMNS,), tl.float64), tl.zeros((COLUMNS,), tl.float64)
    square, other = tl.zeros((COLUMNS,), tl.float64), tl.zeros((COLUMNS,), tl.float64)
    while position < total:
        token, spot = tl.load(tokens + first + position), tl.load(order + first + position)
        # No columns of a token that is none. (The interpreter cannot mask by a vector and a scalar.)
        used = column < tl.where((token >= 0) & (token < size), width, 0)
        value = gradient_at(rows, row_of, example, spot, column, used)
        v += value
        terms += tl.abs(value)
        position += 1
        if tl.load(tokens + first + position, mask=position < total, other=-1) != token:
            if SCALED:
                factor = tl.load(scale + (token * width + column), mask=used, other=0.0).to(tl.float64)
                v *= factor
                terms *= factor
            square += v * v
            other += terms * terms
            v, terms = tl.zeros((COLUMNS,), tl.float64), tl.zeros((COLUMNS,), tl.float64)
    tl.store(squares + tl.program_id(0), tl.sum(square, axis=0))
    tl.store(sizes + tl.program_id(0), tl.sum(other, axis=0))


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
        at, inside, current = token * width + column, column < width, token
        sums, v = tl.zeros((COLUMNS,), tl.float64), tl.zeros((COLUMNS,), tl.float64)
        while current == token:
            spot = tl.load(order + position)
            example = spot // total
            weight = tl.load(weights + example).to(tl.float64)
            # An example of weight 0 is not read: what it holds cannot matter, not even NaN.
            v += gradient_at(rows, row_of, example, spot % total, column, column < tl.where(weight != 0, width, 0))
            position += 1
            current = tl.load(tokens + position, mask=position < count, other=-1)
            following = tl.load(order + position, mask=position < count, other=0) // total
            if (current != token) | (following != example):
                if SCALED:
                    v *= tl.load(scale + at, mask=inside, other=0.0).to(tl.float64)
                sums += weight * v
                v = tl.zeros((COLUMNS,), tl.float64)
        tl.store(out + at, tl.load(out + at, mask=inside, other=0.0) + sums, mask=inside)


@kernel("p", "token_total", "total", "size")
def _cross_kernel(
    token_rows, token_row_of, index, rows, row_of, crossed, p, token_total, total, size,
    SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    blocks = (token_total + SIDE - 1) // SIDE
    example, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * SIDE + tl.arange(0, SIDE)
    token = tl.load(index + example.to(tl.int64) * token_total + first, mask=first < token_total, other=-1)
    mask, start = (token >= 0) & (token < size), 0
    g, weight = rows_at(token_rows, token_row_of, example, first, mask, 4), tl.full((SIDE,), 1.0, tl.float64)
    factor = weights_at(token_rows, token_row_of, first, mask)
    sums = tl.zeros((SIDE, SIDE), tl.float64)
    while start < total:
        second = start + tl.arange(0, SIDE)
        used = second < total
        a, e = rows_at(rows, row_of, example, second, used, 1), rows_at(rows, row_of, example, second, used, 4)
        products = inner_products(g, factor, mask, a, weight, used, p, SIDE, DEPTH)
        entries = tl.load(e[None, :] + token[:, None], mask=mask[:, None] & used[None, :], other=0.0).to(tl.float64)
        sums += products * (entries * weights_at(rows, row_of, second, used)[None, :])
        start += SIDE
    tl.store(crossed + tl.program_id(0), 2 * tl.sum(tl.sum(sums, axis=1), axis=0))
