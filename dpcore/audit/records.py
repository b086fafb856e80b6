"""The records of runs with canaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Records:
    """What one run, or several, showed; R rows: one for each step, twice that with a second moment of its own."""

    canaries: Floats  # (R, m): the releases along each canary's direction, in units of the planned noise
    nulls: Floats  # (R, L, D): those on coordinates that nobody touched, in the same units, by tensor
    signal: Floats  # (R, T): what a canary that takes part in step t is planned to add to its column of `canaries`
    participation: NDArray[np.int64]  # (T, m): how often each canary was used; secret in a real run
    possible: NDArray[np.bool_]  # (T, m): at which steps it might have been used, as everybody knows
    counts: NDArray[np.int64]  # (n,): how often each example (or user) was used in all steps
    tosses: NDArray[np.int64]  # (n,): how often it might have been
    sizes: NDArray[np.int64]  # (T,): of batches
    populations: NDArray[np.int64]  # (T,): how many might have been in each batch
    early: NDArray[np.int64]  # (T,): how many of each batch are of the first half of those
    batches: tuple[str, ...]  # of each run, a digest of its batches
    # (N,): released values, in units of the planned noise, wherever nothing is added: untouched coordinates and, unless
    # examples are replaced, those of canaries that are out.
    silent: Floats
    sums: Floats  # (T, r): of r runs, the releases along the direction of all other examples less their clean sum
    # (T, r): the released sums of an adaptive clip's bits less the clean ones, in units of the planned noise; not
    # finite where the clip norm met its limits, no rows where it is not adapted.
    bits: Floats
    surprises: tuple[str, ...]  # what no run of the plan can show
    coins: NDArray[np.bool_]  # (m,): whether the canary was in


def joined(records: Sequence[Records]) -> Records:
    """Return the records of several runs of one plan as one."""
    axes = {"canaries": 1, "nulls": 2, "participation": 1, "possible": 1, "sums": 1, "bits": 1}
    joint = {
        field.name: np.concatenate([getattr(r, field.name) for r in records], axis=axes.get(field.name, 0))
        for field in fields(Records)
        if field.name not in ("signal", "batches", "surprises")
    }
    return Records(
        **joint,
        signal=records[0].signal,
        batches=tuple(digest for r in records for digest in r.batches),
        surprises=tuple(dict.fromkeys(surprise for r in records for surprise in r.surprises)),
    )
