"""Per-example gradients as pairs of activations and output gradients: certified norms, and weighted sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.check_pairs import check_embedding, check_linear, check_sum
from dpcore.spec.rounding import CANCELLATION

Floats = NDArray[Any]
Indices = NDArray[np.int64]


def linear_norms(
    inputs: Sequence[Floats],
    gradients: Sequence[Floats],
    point_weights: Sequence[float],
    *,
    scale: Floats | None = None,
    gram: bool = False,
    exact: bool = False,
) -> NDArray[np.float64]:
    """See `dpcore.spec.pair_ops.PairOperations.linear_norms`."""
    check_linear(inputs, gradients, point_weights, scale)
    a, e = _joined(inputs), _joined(gradients, point_weights)
    norms = np.zeros(len(a))
    for i in range(len(a)):
        norms[i] = _bound(*_linear(a[i], e[i], scale))
    return norms


def linear_sum(
    inputs: Sequence[Floats],
    gradients: Sequence[Floats],
    point_weights: Sequence[float],
    weights: Floats,
    out: Floats,
    *,
    scale: Floats | None = None,
    exact: bool = False,
) -> None:
    """See `dpcore.spec.pair_ops.PairOperations.linear_sum`."""
    check_linear(inputs, gradients, point_weights, scale)
    check_sum(len(inputs[0]), inputs[0].shape[2] * gradients[0].shape[2], weights, out)
    a, e = _joined(inputs), _joined(gradients, point_weights)
    for i in np.flatnonzero(weights):
        out += float(weights[i]) * _linear(a[i], e[i], scale)[0]


def embedding_norms(
    indices: Sequence[Indices],
    gradients: Sequence[Floats],
    point_weights: Sequence[float],
    size: int,
    *,
    scale: Floats | None = None,
) -> NDArray[np.float64]:
    """See `dpcore.spec.pair_ops.PairOperations.embedding_norms`."""
    check_embedding(indices, gradients, point_weights, size, scale)
    index, e = np.concatenate(indices, axis=1), _joined(gradients, point_weights)
    norms = np.zeros(len(index))
    for i in range(len(index)):
        norms[i] = _bound(*_embedding(index[i], e[i], size, scale))
    return norms


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
    size = max(1, len(out) // max(1, gradients[0].shape[2]))
    check_embedding(indices, gradients, point_weights, size, scale)
    check_sum(len(indices[0]), size * gradients[0].shape[2], weights, out)
    index, e = np.concatenate(indices, axis=1), _joined(gradients, point_weights)
    for i in np.flatnonzero(weights):
        out += float(weights[i]) * _embedding(index[i], e[i], size, scale)[0]


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
) -> NDArray[np.float64]:
    """See `dpcore.spec.pair_ops.PairOperations.tied_norms`."""
    check_embedding(indices, token_gradients, token_weights, size)
    check_linear(inputs, gradients, point_weights)
    index, g = np.concatenate(indices, axis=1), _joined(token_gradients, token_weights)
    a, e = _joined(inputs), _joined(gradients, point_weights)
    norms = np.zeros(len(index))
    for i in range(len(index)):
        one, first = _embedding(index[i], g[i], size, None)
        two, second = _linear(a[i], e[i], None)
        norms[i] = _bound(one + two, first + second)
    return norms


def _joined(parts: Sequence[Floats], weights: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Return the parts one after the other in time, each times its weight, in float64."""
    factors = [1.0] * len(parts) if weights is None else weights
    joined: NDArray[np.float64] = np.concatenate(
        [part.astype(np.float64) * float(factor) for part, factor in zip(parts, factors, strict=True)], axis=1
    )
    return joined


def _linear(a: Floats, e: Floats, scale: Floats | None) -> tuple[Floats, Floats]:
    """Return one example's gradient, and the sum of the sizes of its terms."""
    gradient, size = (e.T @ a).ravel(), (np.abs(e).T @ np.abs(a)).ravel()
    return (gradient, size) if scale is None else (gradient * scale, size * np.abs(scale))


def _embedding(index: Indices, e: Floats, size: int, scale: Floats | None) -> tuple[Floats, Floats]:
    """Return one example's gradient, and the sum of the sizes of its terms."""
    used = index >= 0
    gradient, terms = np.zeros((size, e.shape[1])), np.zeros((size, e.shape[1]))
    np.add.at(gradient, index[used], e[used])
    np.add.at(terms, index[used], np.abs(e[used]))
    one, two = gradient.ravel(), terms.ravel()
    return (one, two) if scale is None else (one * scale, two * np.abs(scale))


def _bound(gradient: Floats, terms: Floats) -> float:
    """Return the norm, raised by the rounding of what the gradient is the sum of, float64."""
    size = float(np.linalg.norm(terms))
    return max(float(np.linalg.norm(gradient)) * (1 + 1e-9) + 1e-12 * size + 1e-290, CANCELLATION * size)
