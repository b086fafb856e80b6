"""The examples that a plan exposes most, and the vector along which it does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpcore.accounting.phases import phases
from dpcore.plan.plan import Plan
from dpcore.stages.clipping import Grouping

Floats = NDArray[np.float64]


def secret_batches(plan: Plan) -> bool:
    """Whether the claim rests on batches that the adversary does not know."""
    found = phases(plan.event)
    return found is None or bool(found.steps)


def most_exposed(plan: Plan, planned: Sequence[NDArray[np.int64]], matrix: Floats, count: int) -> NDArray[np.int64]:
    """Return the canaries: where batches are public, the examples whose participation moves C S the most."""
    if secret_batches(plan):
        return np.arange(count)
    uses = np.bincount(np.concatenate(planned), minlength=plan.sampler.dataset_size)
    candidates = np.sort(np.argsort(-uses, kind="stable")[: max(count, 4096)])
    moved = matrix @ np.stack([np.isin(candidates, batch) for batch in planned])
    chosen = np.argsort(-np.linalg.norm(moved, axis=0).round(9), kind="stable")[:count]
    return np.sort(candidates[chosen])


def direction(grouping: Grouping, rule: str) -> Floats:
    """Return the unit vector, over tensors, of the longest clipped vector with equal entries in a group's tensors."""
    shares = np.zeros(sum(len(members) for members in grouping.members))
    for members, bound in zip(grouping.members, grouping.bounds, strict=True):
        shares[list(members)] = (1.0 if rule == "normalized" else bound) / np.sqrt(len(members))
    return np.asarray(shares / np.linalg.norm(shares))
