"""The records of runs with canaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Records:
    """What one run, or several, showed; R rows: one for each step, twice that with a second moment of its own.

    Attributes
    ----------
    canaries : (R, m) array
        The releases along each canary's direction, in units of the planned noise.
    nulls : (R, L, D) array
        The releases on coordinates that nobody touched, in the same units, by tensor.
    signal : (R, T) array
        What a canary that takes part in step t is planned to add to its column of `canaries`, by t.
    participation : (T, m) array of int
        How often each canary was used at each step. Secret in a real run.
    possible : (T, m) array of bool
        At which steps it might have been used, as everybody knows.
    counts : (n,) array of int
        How often each example (or user) was used in all steps.
    tosses : (n,) array of int
        How often it might have been.
    sizes : (T,) array of int
        Batch sizes.
    populations : (T,) array of int
        How many might have been in each batch.
    early : (T,) array of int
        How many of each batch are of the first half of those.
    batches : tuple of str
        Of each run, a digest of its batches.
    silent : (N,) array
        Released values, in units of the planned noise, wherever nothing is added: untouched coordinates and, unless
        examples are replaced, those of canaries that are out.
    sums : (T, r) array
        Of r runs: the releases along the direction of all other examples less their clean sum, in units of the noise.
    bits : (T, r) array
        Of r runs: the released sums of an adaptive clip's bits less the clean ones, in units of the planned noise; not
        finite where the clip norm met its limits, no rows where it is not adapted.
    surprises : tuple of str
        What no run of the plan can show.
    coins : (m,) array of bool
        Whether the canary was in.
    """

    canaries: Floats
    nulls: Floats
    signal: Floats
    participation: NDArray[np.int64]
    possible: NDArray[np.bool_]
    counts: NDArray[np.int64]
    tosses: NDArray[np.int64]
    sizes: NDArray[np.int64]
    populations: NDArray[np.int64]
    early: NDArray[np.int64]
    batches: tuple[str, ...]
    silent: Floats
    sums: Floats
    bits: Floats
    surprises: tuple[str, ...]
    coins: NDArray[np.bool_]


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
