"""Correlated noise on a grid: one step of a recurrence, or of a sum over a ring of earlier vectors.

The same lines work on torch's tensors: they have operators and assignments only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpcore.spec.check import check_correlate
from dpcore.spec.grid import nearest
from dpcore.spec.ops import Correlation, FilterCoefficients, RingCoefficients
from dpcore.spec.rounded_normal import FRACTION_BITS

Floats = Any


def correlate(z: Floats, state: Sequence[Floats], coefficients: Correlation, *, bits: int = FRACTION_BITS) -> Floats:
    """See `dpcore.spec.ops.Backend.correlate`."""
    check_correlate(z, state, coefficients, bits)
    if isinstance(coefficients, RingCoefficients):
        return _ring(z, state, coefficients, bits)
    return _recurrence(z, state, coefficients, bits)


def _ring(z: Floats, vectors: Sequence[Floats], coefficients: RingCoefficients, bits: int) -> Floats:
    weights, place, normalizer, keeps = coefficients
    if not vectors:
        return z
    r = 0.0 * z
    for j, weight in enumerate(weights, start=1):
        r += float(weight) * vectors[(place - j) % len(vectors)]
    m = _added(z, r, bits)
    vectors[place][...] = m * (1 / normalizer) if keeps == "output" else z
    return m


def _recurrence(z: Floats, state: Sequence[Floats], coefficients: FilterCoefficients, bits: int) -> Floats:
    b, a, _ = coefficients
    if not state:
        return z
    m = _added(z, state[0], bits)
    x = m - state[0]
    for k in range(1, len(state) + 1):
        s = (float(b[k]) if k < len(b) else 0.0) * x
        s -= (float(a[k - 1]) if k <= len(a) else 0.0) * m
        if k < len(state):
            s += state[k]
        state[k - 1][...] = s
    return m


def _added(z: Floats, r: Floats, bits: int) -> Floats:
    """Return ``z + nearest(2^bits r) 2^-bits``."""
    m: Floats = nearest(r * 2.0**bits) * 2.0**-bits
    m += z
    return m
