"""Embeddings: norms and weighted sums of gradients with a row for each token, without a table for each example."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpcore.spec.check_pairs import check_embedding, check_sum
from dpcore.spec.grid import nearest
from dpcore_numpy.denormals import check_denormals
from dpcore_numpy.pairs import U64, Bound, Floats, Indices, Side, Wide, gamma

_ROWS = 512  # rows of several examples, taken at once


def embedding_norms(
    indices: Sequence[Indices],
    gradients: Sequence[Floats],
    point_weights: Sequence[float],
    size: int,
    *,
    scale: Floats | None = None,
) -> Wide:
    """See `dpcore.spec.pair_ops.PairOperations.embedding_norms`."""
    check_embedding(indices, gradients, point_weights, size, scale)
    check_denormals()
    with np.errstate(all="ignore"):  # a warning would reveal something of one example
        bound = embedding_bound(indices, Side(gradients, point_weights), size, scale)
        return bound.norms + bound.rounding


def embedding_bound(indices: Sequence[Indices], e: Side, size: int, scale: Floats | None = None) -> Bound:
    """Return the parts of `embedding_norms`.

    Notes
    -----
    Let S be the sum of the norms of the example's rows, k their number, u = 2^-53. A token's sum is off by at most
    gamma_{k+4} times the sum of its terms' sizes (the weight and the scale round each term), so all tokens together are
    off by gamma_{k+4} S. The squares of q entries and their sum are off by gamma_{q+k+8} of themselves.
    """
    index, count = np.concatenate(indices, axis=1), max(1, _ROWS // max(1, e.time))
    norms, terms = np.empty(e.examples), np.empty(e.examples)
    wide = e.double or len(e.parts) > 1 or (scale is not None and scale.dtype == np.float64)
    for first in range(0, e.examples, count):
        chosen = slice(first, first + count)
        rows, exponents = _rows(index[chosen], e, chosen, size, scale), np.zeros(len(index[chosen]), np.int64)
        if wide:  # squares of float32 numbers fit float64, if no weights make them smaller
            largest = np.abs(rows).max(axis=(1, 2), initial=0.0)
            exponents = np.where(np.isfinite(largest), np.frexp(largest)[1], 0)
            rows = np.ldexp(rows, -exponents[:, None, None])
        examples = np.arange(len(rows))[:, None] * size
        keys, sums = _sums(np.where(index[chosen] < 0, -1, index[chosen] + examples), rows)
        squares = np.bincount(keys // size, np.vecdot(sums, sums), len(rows))
        unit = abs(e.unit) * (1 + gamma(e.width + e.time + 12, U64))
        norms[chosen] = np.ldexp(np.sqrt(squares) * unit, exponents)
        terms[chosen] = np.ldexp(np.sqrt(np.vecdot(rows, rows)).sum(axis=1) * unit, exponents)
    error = gamma(e.time + 5, U64) * terms
    return Bound(norms + error + 5e-324 * (terms > 0), error, terms)


def _rows(index: Indices, e: Side, chosen: slice | Indices, size: int, scale: Floats | None) -> Wide:
    """Return some examples' rows in float64, times their token's scale; 0 where the index is negative."""
    rows = e.wide(chosen, normalized=False)
    if scale is not None:
        rows *= scale.reshape(size, e.width)[index]
    rows[index < 0] = 0.0
    return rows


def _sums(keys: Indices, rows: Wide) -> tuple[Indices, Wide]:
    """Return the keys that are not negative, each once, and the sums of their rows."""
    from scipy.sparse import csr_array  # takes a tenth of a second; only models with embeddings need it

    flat = keys.reshape(-1)
    order = np.argsort(flat, kind="stable")
    order = order[np.searchsorted(flat[order], 0) :]
    ordered = flat[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    table = (np.ones(len(order)), order, np.append(starts, len(order)))
    sums: Wide = csr_array(table, shape=(len(starts), len(flat))) @ rows.reshape(len(flat), rows.shape[-1])
    return ordered[starts], sums


def embedding_sum(
    indices: Sequence[Indices],
    gradients: Sequence[Floats],
    point_weights: Sequence[float],
    weights: Floats,
    out: Floats,
    *,
    scale: Floats | None = None,
) -> None:
    """See `dpcore.spec.pair_ops.PairOperations.embedding_sum`."""
    e = Side(gradients, point_weights)
    size = len(out) // max(1, e.width)
    check_embedding(indices, gradients, point_weights, size, scale)
    check_sum(e.examples, size * e.width, weights, out)
    index, total, used = np.concatenate(indices, axis=1), out.reshape(size, e.width), np.flatnonzero(weights)
    count = max(1, _ROWS // max(1, e.time))
    with np.errstate(all="ignore"):
        for first in range(0, len(used), count):
            chosen = used[first : first + count]
            # First sum over each example's tokens, so that its addend depends on no other example; then over examples.
            examples, picked = np.arange(len(chosen))[:, None], index[chosen]
            keys = np.where(picked < 0, -1, picked * len(chosen) + examples)
            keys, sums = _sums(keys, _rows(picked, e, chosen, size, scale))
            tokens, owners = np.divmod(keys, len(chosen))
            rounded = nearest(weights[chosen][owners, None] * (e.unit * sums))
            tokens, sums = _sums(tokens, rounded)
            total[tokens] += sums
