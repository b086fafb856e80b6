"""The filter stage: `dpcore_numpy.filter` in torch's threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dpcore.spec.check import check_recurrence
from dpcore.spec.ops import FilterCoefficients


def recurrence(x: torch.Tensor, state: Sequence[torch.Tensor], coefficients: FilterCoefficients) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.recurrence`."""
    check_recurrence(x, state, coefficients)
    b, a = [float(value) for value in coefficients.b], [float(value) for value in coefficients.a]
    normalizer = float(coefficients.normalizer)
    y = x if b[0] == 1 else b[0] * x
    if state:
        y = y + state[0]
    for k in range(1, len(state) + 1):
        s = b[k] * x if k < len(b) else torch.zeros_like(x)
        if k <= len(a):
            s.sub_(a[k - 1] * y)
        if k < len(state):
            s.add_(state[k])
        state[k - 1].copy_(s)
    return y if normalizer == 1 else y / normalizer
