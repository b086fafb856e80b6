"""Noise from a ring of earlier vectors: one step of a sum over those of the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from dpcore.spec.check import check_ring
from dpcore.spec.ops import RingCoefficients

Floats = NDArray[Any]


def ring(x: Floats, vectors: Sequence[Floats], coefficients: RingCoefficients) -> Floats:
    """See `dpcore.spec.ops.Backend.ring`."""
    check_ring(x, vectors, coefficients)
    weights, place, normalizer, keeps = coefficients
    y = x
    for j, weight in enumerate(weights, start=1):
        y = y + float(weight) * vectors[(place - j) % len(vectors)]
    if normalizer != 1:
        y = y / float(normalizer)
    if vectors:
        vectors[place][...] = y if keeps == "output" else x
    return y
