"""Correlated noise on a grid: `dpcore_numpy.correlate` in torch's threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dpcore.spec.check import check_correlate
from dpcore.spec.grid import nearest
from dpcore.spec.ops import Correlation, FilterCoefficients, RingCoefficients
from dpcore.spec.rounded_normal import FRACTION_BITS


def correlate(
    z: torch.Tensor, state: Sequence[torch.Tensor], coefficients: Correlation, *, bits: int = FRACTION_BITS
) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.correlate`."""
    check_correlate(z, state, coefficients, bits)
    if isinstance(coefficients, RingCoefficients):
        return _ring(z, state, coefficients, bits)
    return _recurrence(z, state, coefficients, bits)


def _ring(z: torch.Tensor, vectors: Sequence[torch.Tensor], coefficients: RingCoefficients, bits: int) -> torch.Tensor:
    weights, place, normalizer, keeps = coefficients
    if not vectors:
        return z
    r = torch.zeros_like(z)
    for j, weight in enumerate(weights, start=1):
        r.add_(vectors[(place - j) % len(vectors)] * float(weight))
    m = _added(z, r, bits)
    vectors[place].copy_(m * (1 / normalizer) if keeps == "output" else z)
    return m


def _recurrence(
    z: torch.Tensor, state: Sequence[torch.Tensor], coefficients: FilterCoefficients, bits: int
) -> torch.Tensor:
    b, a, _ = coefficients
    if not state:
        return z
    m = _added(z, state[0], bits)
    x = m - state[0]
    for k in range(1, len(state) + 1):
        s = x * (float(b[k]) if k < len(b) else 0.0)
        s.sub_(m * (float(a[k - 1]) if k <= len(a) else 0.0))
        if k < len(state):
            s.add_(state[k])
        state[k - 1].copy_(s)
    return m


def _added(z: torch.Tensor, r: torch.Tensor, bits: int) -> torch.Tensor:
    """See `dpcore_numpy.correlate`."""
    m: torch.Tensor = nearest(r * 2.0**bits).mul_(2.0**-bits).add_(z)
    return m
