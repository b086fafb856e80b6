"""The operations on linear layers, for one layer alone."""

from typing import Any

from dpcore.spec.pair_ops import LinearPairs


def linear_norms(
    backend: Any, inputs: Any, gradients: Any, point_weights: Any, *, scale: Any = None, **options: Any
) -> Any:
    """Return the norms of one layer; `options` are those of `LinearPairs`."""
    (norms,) = backend.linear_norms([LinearPairs(inputs, gradients, point_weights, **options)], [scale])
    return norms


def linear_sum(
    backend: Any, inputs: Any, gradients: Any, point_weights: Any, weights: Any, out: Any, *, scale: Any = None,
    longest: float | None = None, **options: Any,
) -> None:  # fmt: skip
    """Add the sum of one layer."""
    layer = LinearPairs(inputs, gradients, point_weights, **options)
    backend.linear_sums([layer], [weights], [out], [scale], None if longest is None else [longest])
