"""The filter stage: one step of a linear recurrence over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpcore.spec.check import check_recurrence
from dpcore.spec.ops import FilterCoefficients

Floats = Any  # arrays of NumPy, or torch's tensors


def recurrence(x: Floats, state: Sequence[Floats], coefficients: FilterCoefficients) -> Floats:
    """See `dpcore.spec.ops.Backend.recurrence`."""
    check_recurrence(x, state, coefficients)
    # As Python floats: NumPy's own float64 scalars would widen float32 arrays.
    b, a = [float(value) for value in coefficients.b], [float(value) for value in coefficients.a]
    normalizer = float(coefficients.normalizer)
    y = x if b[0] == 1 else b[0] * x
    if state:
        y = y + state[0]
    for k in range(1, len(state) + 1):
        s = b[k] * x if k < len(b) else 0.0
        if k <= len(a):
            s = s - a[k - 1] * y
        if k < len(state):
            s = s + state[k]
        state[k - 1][...] = s
    return y if normalizer == 1 else y / normalizer
