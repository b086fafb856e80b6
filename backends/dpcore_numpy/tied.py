"""Norms of a matrix that is an embedding and a linear map at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpcore.spec.check_pairs import check_embedding, check_linear, check_tied, check_tied_rows
from dpcore.spec.contributions import CANCELLATION
from dpcore_numpy.clip import row_norms
from dpcore_numpy.denormals import check_denormals
from dpcore_numpy.embedding import embedding_bound
from dpcore_numpy.linear import NUMPY, Arithmetic, linear_bound, raised_for_terms
from dpcore_numpy.pairs import U64, Bound, Floats, Indices, Side, Wide, gamma


def tied_norms(
    indices: Sequence[Indices],
    token_gradients: Sequence[Floats],
    token_weights: Sequence[float],
    inputs: Sequence[Floats],
    gradients: Sequence[Floats],
    point_weights: Sequence[float],
    size: int,
    *,
    exact: bool = False,
    arithmetic: Arithmetic | None = None,
) -> Wide:
    """See `dpcore.spec.pair_ops.PairOperations.tied_norms`.

    Notes
    -----
    N_E and N_H bound the parts' norms, S_E and S_H are the sums of the norms of their terms. The computed <E, H> is off
    by at most ``gamma_n S_E S_H`` with n = p + T_E T_H + 10 in float64: each of its terms is a product of p terms.
    """
    check_embedding(indices, token_gradients, token_weights, size)
    check_linear(inputs, gradients, point_weights)
    check_tied(token_gradients, inputs, gradients, size)
    check_denormals()
    by = arithmetic or NUMPY
    g, a, e = Side(token_gradients, token_weights), by.side(inputs), by.side(gradients, point_weights)
    with np.errstate(all="ignore"):  # a warning would tell of one example
        embedding = embedding_bound(indices, g, size)
        gram = a.time * (a.width + e.width) < a.width * e.width
        linear = linear_bound(a, e, gram=gram, exact=exact, by=by)
        unit = _unit(embedding, linear)
        cross = _cross(indices, g, a, e, unit)
        bound = _together(embedding, linear, unit, cross, a.width + g.time * a.time)
        return raised_for_terms(bound, linear)


def tied_row_norms(
    indices: Sequence[Indices],
    token_gradients: Sequence[Floats],
    token_weights: Sequence[float],
    rows: Floats,
    size: int,
) -> Wide:
    """See `dpcore.spec.pair_ops.PairOperations.tied_row_norms`.

    Notes
    -----
    H is what is added, so that nothing of it is rounded. With the norm of H for S_H, the computed <E, H> is off as in
    `tied_norms`: each of its T_E terms is a product of p terms.
    """
    check_embedding(indices, token_gradients, token_weights, size)
    check_tied_rows(token_gradients, rows, size)
    check_denormals()
    g, index = Side(token_gradients, token_weights), np.concatenate(indices, axis=1)
    with np.errstate(all="ignore"):  # a warning would tell of one example
        embedding, norms = embedding_bound(indices, g, size), row_norms([rows])
        norms *= 1 + gamma(size * g.width + 10, U64)
        head = Bound(norms, np.zeros(g.examples), norms)
        unit, cross = _unit(embedding, head), np.empty(g.examples)
        for i in range(g.examples):
            kept = index[i] >= 0
            tokens = g.wide(slice(i, i + 1), normalized=False)[0][kept] * (g.unit / unit[i])
            cross[i] = np.vdot(rows[i].reshape(size, g.width)[index[i][kept]] / unit[i], tokens)
        return _together(embedding, head, unit, cross, g.width + g.time)


def _unit(embedding: Bound, head: Bound) -> Wide:
    """Return the larger part's norm: squares of float64 numbers may overflow, or come out 0, and are relative to it."""
    larger = np.maximum(embedding.norms, head.norms)
    unit: Wide = np.where((larger > 0) & np.isfinite(larger), larger, 1.0)
    return unit


def _together(embedding: Bound, head: Bound, unit: Wide, cross: Wide, additions: int) -> Wide:
    """Return a bound on the norm of E + H.

    `cross` is <E, H> over the square of `unit`, computed with about `additions` additions in float64.
    """
    x, y = embedding.norms / unit, head.norms / unit
    error = gamma(additions + 20, U64) * (embedding.terms / unit) * (head.terms / unit)
    square = x * x + y * y + 2 * (cross + error)
    norms = unit * np.sqrt(np.maximum(square, 0)) * (1 + 16 * U64) + head.rounding + embedding.rounding
    bound: Wide = np.maximum(norms, CANCELLATION * (embedding.norms + head.norms))
    return bound


def _cross(indices: Sequence[Indices], g: Side, a: Side, e: Side, unit: Wide) -> Wide:
    """Return ``<E, H> = sum_{s,t} e_t[index_s] (g_s . a_t)`` divided by the square of `unit`."""
    index, cross = np.concatenate(indices, axis=1), np.empty(a.examples)
    for i in range(a.examples):
        one, kept = slice(i, i + 1), index[i] >= 0
        picked = np.concatenate([part[i][:, index[i][kept]] for part in e.parts], dtype=np.float64)
        weights = np.repeat(e.ratios, [part.shape[1] for part in e.parts]) * e.unit
        picked *= (weights / unit[i])[:, None]
        tokens = g.wide(one, normalized=False)[0][kept] * (g.unit / unit[i])
        cross[i] = np.vdot(np.matmul(a.wide(one, normalized=False)[0], tokens.T), picked)
    return cross
