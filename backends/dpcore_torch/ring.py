"""Noise from a ring of earlier vectors: `dpcore_numpy.ring` in torch's threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dpcore.spec.check import check_ring
from dpcore.spec.ops import RingCoefficients


def ring(x: torch.Tensor, vectors: Sequence[torch.Tensor], coefficients: RingCoefficients) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.ring`."""
    check_ring(x, vectors, coefficients)
    weights, place, normalizer, keeps = coefficients
    y = x.clone() if weights else x
    for j, weight in enumerate(weights, start=1):
        y.add_(float(weight) * vectors[(place - j) % len(vectors)])
    if normalizer != 1:
        y = y / float(normalizer)
    if vectors:
        vectors[place].copy_(y if keeps == "output" else x)
    return y
