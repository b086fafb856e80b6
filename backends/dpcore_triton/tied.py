"""The gradient of a matrix that is an embedding and a linear map: certified norms."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from dpcore.spec.check_pairs import check_embedding, check_linear, check_tied_rows
from dpcore.spec.contributions import CANCELLATION
from dpcore.spec.pair_ops import LinearPairs
from dpcore_triton import core_linear
from dpcore_triton.chips import chip_of
from dpcore_triton.cores import LIMIT, UNDER, most_rounding
from dpcore_triton.cores import UNIT as ROUNDING
from dpcore_triton.embedding import TOKEN_COLUMNS, joined, tokens_of
from dpcore_triton.gram import blocks_of, fill_gram, fill_lengths, inner_products, signed_roundings
from dpcore_triton.launch import common_device, kernel, launch, read_as_float32
from dpcore_triton.layers import layers_of
from dpcore_triton.pairs import (
    DEPTH,
    POSITIONS,
    WIDTH,
    Bound,
    bound,
    exponent_of,
    norm_of,
    parts_of,
    rows_at,
    weights_at,
)
from dpcore_triton.pairs import UNIT as ROUNDING_64
from dpcore_triton.row_norms import row_norms

Tensor = torch.Tensor


def tied_norms(
    indices: Sequence[Tensor],
    token_gradients: Sequence[Tensor],
    token_weights: Sequence[float],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    point_weights: Sequence[float],
    size: int,
    *,
    exact: bool = False,
) -> Tensor:
    """See `dpcore.spec.pair_ops.PairOperations.tied_norms`.

    Everything here is float64. The linear part is measured by inner products: a vocabulary is larger than a text. On a
    chip whose tensor cores are known its sum may round more than that, as `dpcore_triton.cores` says, unless `exact`.
    """
    check_embedding(indices, token_gradients, token_weights, size)
    check_linear(inputs, gradients, point_weights)
    arrays = {"token_gradients": token_gradients, "inputs": inputs, "gradients": gradients}
    read_as_float32(**arrays)
    device = common_device(indices=indices, **arrays)
    exponent, p = exponent_of([*token_weights, *point_weights]), inputs[0].shape[2]
    tokens = parts_of(None, token_gradients, token_weights, device, [exponent] * len(token_gradients))
    head = layers_of([LinearPairs(inputs, gradients, point_weights)], None, [exponent])
    parts = head.parts
    index = joined(indices)
    embedding, token_lengths = tokens_of(tokens, index, p, size, None)
    crossed = tokens.empty(blocks_of(tokens.total))
    launch(
        _cross_kernel, (crossed.numel(),), device, tokens.rows, tokens.row_of, index, parts.rows, parts.row_of,
        crossed, p, tokens.total, parts.total, size, POSITIONS=POSITIONS, DEPTH=DEPTH,
    )  # fmt: skip
    linear, lengths = parts.empty(blocks_of(parts.total)), parts.empty(parts.total)
    fill_gram(head, linear, [blocks_of(parts.total)], [0])
    cores = not exact and chip_of(device) is not None
    (core_linear.fill_lengths if cores else fill_lengths)(head, lengths, [True])
    adding = TOKEN_COLUMNS + embedding.shape[1]
    signed = signed_roundings(p, size, parts.total) + adding + crossed.shape[1]
    whole = [torch.cat([embedding, linear, crossed], dim=1), torch.cat([token_lengths, lengths], dim=1)]
    norms = norm_of(parts, bound(tokens.total + parts.total, signed=signed), exponent, *whole)
    first = norm_of(tokens, bound(tokens.total, squares=adding), exponent, embedding, token_lengths)
    second = norm_of(parts, bound(parts.total, signed=signed), exponent, linear, lengths)
    norms = torch.maximum(norms, CANCELLATION * (first + second))
    if not cores:
        return norms
    # The sum, and its weights in float32: relative to the head's own terms, which the other part may cancel.
    rho = most_rounding([part.shape[1] for part in inputs]) + 4 * ROUNDING
    return norms + norm_of(parts, Bound(0.0, rho, 0.0, UNDER, LIMIT), exponent, linear, lengths)


def tied_row_norms(
    indices: Sequence[Tensor],
    token_gradients: Sequence[Tensor],
    token_weights: Sequence[float],
    rows: Tensor,
    size: int,
) -> Tensor:
    """See `dpcore.spec.pair_ops.PairOperations.tied_row_norms`."""
    check_embedding(indices, token_gradients, token_weights, size)
    check_tied_rows(token_gradients, rows, size)
    read_as_float32(token_gradients=token_gradients, rows=[rows])
    device = common_device(indices=indices, token_gradients=token_gradients, rows=[rows])
    # The weight of the rows is 1, and is no larger than that of the largest part.
    exponent, p = max(exponent_of(token_weights), 0), token_gradients[0].shape[2]
    tokens, index = (
        parts_of(None, token_gradients, token_weights, device, [exponent] * len(token_gradients)),
        joined(indices),
    )
    embedding, lengths = tokens_of(tokens, index, p, size, None)
    crossed = tokens.empty(blocks_of(tokens.total))
    launch(
        _gathered_kernel, (crossed.numel(),), device, tokens.rows, tokens.row_of, index, rows.detach().contiguous(),
        crossed, p, tokens.total, size, POSITIONS=POSITIONS, COLUMNS=WIDTH // 2,
    )  # fmt: skip
    norms = row_norms([rows])[:, None] * (1 + 2 * (rows.shape[1] + 10) * ROUNDING_64)
    head = norms * 2.0**-exponent
    adding = TOKEN_COLUMNS + embedding.shape[1]
    signed = p + tokens.total + POSITIONS + WIDTH + adding + crossed.shape[1]
    whole = [torch.cat([embedding, crossed * 2.0**-exponent, head * head], dim=1), torch.cat([lengths, head], dim=1)]
    found = norm_of(tokens, bound(tokens.total, signed=signed), exponent, *whole)
    alone = norm_of(tokens, bound(tokens.total, squares=adding), exponent, embedding, lengths)
    return torch.maximum(found, CANCELLATION * (alone + norms[:, 0]))


@kernel("p", "token_total", "total", "size")
def _cross_kernel(
    token_rows, token_row_of, index, rows, row_of, crossed, p, token_total, total, size,
    POSITIONS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    blocks = (token_total + POSITIONS - 1) // POSITIONS
    example, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * POSITIONS + tl.arange(0, POSITIONS)
    token = tl.load(index + example.to(tl.int64) * token_total + first, mask=first < token_total, other=-1)
    mask, start = (token >= 0) & (token < size), 0
    g, weight = rows_at(token_rows, token_row_of, example, first, mask, 4), tl.full((POSITIONS,), 1.0, tl.float64)
    factor = weights_at(token_rows, token_row_of, first, mask)
    sums = tl.zeros((POSITIONS, POSITIONS), tl.float64)
    while start < total:
        second = start + tl.arange(0, POSITIONS)
        used = second < total
        a, e = rows_at(rows, row_of, example, second, used, 1), rows_at(rows, row_of, example, second, used, 4)
        products = inner_products(g, factor, mask, a, weight, used, p, POSITIONS, DEPTH)
        entries = tl.load(e[None, :] + token[:, None], mask=mask[:, None] & used[None, :], other=0.0).to(tl.float64)
        sums += products * (entries * weights_at(rows, row_of, second, used)[None, :])
        start += POSITIONS
    tl.store(crossed + tl.program_id(0), 2 * tl.sum(tl.sum(sums, axis=1), axis=0))


@kernel("p", "total", "size")
def _gathered_kernel(
    rows, row_of, index, head, crossed, p, total, size, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    blocks = (total + POSITIONS - 1) // POSITIONS
    example = (tl.program_id(0) // blocks).to(tl.int64)
    position, start = tl.program_id(0) % blocks * POSITIONS + tl.arange(0, POSITIONS), 0
    token = tl.load(index + example * total + position, mask=position < total, other=-1)
    mask = (token >= 0) & (token < size)
    g, h = rows_at(rows, row_of, example, position, mask, 4), head + (example * size + token) * p
    weight, sums = weights_at(rows, row_of, position, mask), tl.zeros((POSITIONS, COLUMNS), tl.float64)
    while start < p:
        column = start + tl.arange(0, COLUMNS)
        inside = mask[:, None] & (column < p)[None, :]
        one = tl.load(g[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float64)
        other = tl.load(h[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32).to(tl.float64)
        sums += one * weight[:, None] * other
        start += COLUMNS
    tl.store(crossed + tl.program_id(0), 2 * tl.sum(tl.sum(sums, axis=1), axis=0))
