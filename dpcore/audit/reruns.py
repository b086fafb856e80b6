"""Runs taken again: unobserved steps, and steps without data, must end where the recorded run ended."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpcore.audit.canaries import CanaryRun
from dpcore.audit.releases import Releases, noisy_bits
from dpcore.spec.stream import Stream

MORE = "The parameters are no function of the releases: something else of the data moves them."
UNSEEN = "Steps that nobody observes move the parameters elsewhere than steps that are recorded."


def ends_as(run: CanaryRun, unseen: CanaryRun) -> bool:
    """Whether a run of the same keys and coins, taken now with nobody observing, ends at the same parameters.

    What is observed runs as separate operations; in training one fused operation takes the step, and what it adds is
    not seen in the releases.
    """
    for _ in range(run.plan.steps):
        unseen.step()
    return _same(run, unseen)


def follows_from_releases(run: CanaryRun, releases: Releases, empty: CanaryRun) -> bool:
    """Whether a run with no data, whose noise is the releases of `run`, ends at the same parameters.

    Its steps release the very same vectors, so what is a function of the releases is the same. A filter, a second
    moment or a loop that has the clean sum from elsewhere is not.
    """
    mechanism, backend = empty.mechanism, empty.mechanism.backend
    norms, plan = run.mechanism.clip_norms, run.plan

    def normals(row: int, stream: int) -> list[Any]:
        if stream == Stream.CLIP_BOUND:
            assert norms is not None
            return [np.array([noisy_bits(plan, norms[row], norms[row + 1]) / plan.bit_noise_standard_deviation])]
        white = releases.white[int(stream == Stream.SECOND_MOMENT), row]
        return [backend.from_numpy(vector.astype(run.dtype)) for vector in white]

    release = mechanism.release

    def released(*arguments: Any, **named: Any) -> None:
        release(*arguments, **{**named, "normals": normals})

    mechanism.release = released  # type: ignore[method-assign]
    empty.amount[:] = 0
    for _ in range(plan.steps):
        empty.step()
    return _same(run, empty)


def _same(run: CanaryRun, other: CanaryRun) -> bool:
    tolerance = 1e-6 if run.dtype == np.float64 else 1e-2
    return all(
        np.allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(a[np.isfinite(a)]).max(initial=0), equal_nan=True)
        for a, b in zip(run.values(), other.values(), strict=True)
    )
