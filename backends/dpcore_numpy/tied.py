"""Norms of a matrix that is an embedding and a linear map at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpcore.spec.check_pairs import check_embedding, check_linear, check_tied
from dpcore.spec.contributions import CANCELLATION
from dpcore_numpy.denormals import check_denormals
from dpcore_numpy.embedding import embedding_bound
from dpcore_numpy.gram import Matmul
from dpcore_numpy.linear import NUMPY, Arithmetic, linear_bound, raised_for_terms
from dpcore_numpy.pairs import U64, Floats, Indices, Side, Wide, gamma


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
        linear = linear_bound(a, e, gram=gram, exact=exact, arithmetic=by)
        # Relative to the larger part: squares of float64 numbers may overflow, or come out 0.
        larger = np.maximum(embedding.norms, linear.norms)
        unit = np.where((larger > 0) & np.isfinite(larger), larger, 1.0)
        x, y = embedding.norms / unit, linear.norms / unit
        terms = (embedding.terms / unit) * (linear.terms / unit)
        error = gamma(a.width + g.time * a.time + 20, U64) * terms
        square = x * x + y * y + 2 * (_cross(indices, g, a, e, unit, by.matmul) + error)
        norms = unit * np.sqrt(np.maximum(square, 0)) * (1 + 16 * U64) + linear.rounding + embedding.rounding
        bound: Wide = np.maximum(norms, CANCELLATION * (embedding.norms + linear.norms))
        return raised_for_terms(bound, linear)


def _cross(indices: Sequence[Indices], g: Side, a: Side, e: Side, unit: Wide, matmul: Matmul) -> Wide:
    """Return ``<E, H> = sum_{s,t} e_t[index_s] (g_s . a_t)`` divided by the square of `unit`."""
    index, cross = np.concatenate(indices, axis=1), np.empty(a.examples)
    for i in range(a.examples):
        one, kept = slice(i, i + 1), index[i] >= 0
        picked = np.concatenate([part[i][:, index[i][kept]] for part in e.parts], dtype=np.float64)
        weights = np.repeat(e.ratios, [part.shape[1] for part in e.parts]) * e.unit
        picked *= (weights / unit[i])[:, None]
        tokens = g.wide(one, normalized=False)[0][kept] * (g.unit / unit[i])
        cross[i] = np.vdot(matmul(a.wide(one, normalized=False)[0], tokens.T), picked)
    return cross
