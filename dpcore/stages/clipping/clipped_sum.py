"""The clipped sum of a micro-batch: norms, factors and weighted sums, as one piece of work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from dpcore.spec.ops import Backend
from dpcore.stages.clipping.blocks import Block
from dpcore.stages.clipping.groups import Grouping
from dpcore.stages.clipping.together import norms_of


def add_clipped(
    backend: Backend[Any],
    blocks: Sequence[Block],
    rule: str,
    grouping: Grouping,
    sizes: Sequence[int],
    unit: float,
    totals: Sequence[Any],
    scales: Sequence[Any],
    add_sums: Callable[..., None],
) -> Any:
    """Add each example's vector to `totals` in place, scaled and clipped; return the norms in the first group, (B,).

    A function of its arguments alone, so that a backend may repeat it (`dpcore.spec.ops.Backend.repeat`).

    Parameters
    ----------
    backend : Backend
    blocks : sequence of Block
        One for each tensor.
    rule : str
        See `dpcore.spec.ops.Backend.clip_factors`.
    grouping : Grouping
    sizes : sequence of int
        Coordinates of each group.
    unit : float
        The grid's step: what one of the sum's integers stands for.
    totals : sequence of (d_l,) float64 arrays of integers, in place
    scales : sequence of (d_l,) arrays or None
    add_sums : callable
        See `dpcore.mechanism.peers.Peers.add_sums`.
    """
    norms = norms_of(backend, blocks, grouping.members, scales)
    factors = backend.clip_factors(norms, rule, grouping.bounds, sizes, roundings_of(blocks, grouping), unit)
    weights: list[Any] = [None] * len(blocks)
    for members, factor in zip(grouping.members, factors, strict=True):
        for i in members:
            weights[i] = factor
    add_sums(backend, blocks, weights, totals, scales)
    return norms[0]


def roundings_of(blocks: Sequence[Block], grouping: Grouping) -> list[float]:
    """Return how far, in the grid's steps, rounding moves what an example adds to each group."""
    return [math.hypot(*(blocks[i].rounding for i in members)) for members in grouping.members]
