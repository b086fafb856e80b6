"""What runs with canaries showed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        How often each example was used in all steps.
    sizes : (T,) array of int
        Batch sizes.
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
    sizes: NDArray[np.int64]
    surprises: tuple[str, ...]
    coins: NDArray[np.bool_]


def joined(records: Sequence[Records]) -> Records:
    """Return the records of several runs of one plan as one."""
    return Records(
        np.concatenate([r.canaries for r in records], axis=1),
        np.concatenate([r.nulls for r in records], axis=2),
        records[0].signal,
        np.concatenate([r.participation for r in records], axis=1),
        np.concatenate([r.possible for r in records], axis=1),
        np.concatenate([r.counts for r in records]),
        np.concatenate([r.sizes for r in records]),
        tuple(dict.fromkeys(surprise for r in records for surprise in r.surprises)),
        np.concatenate([r.coins for r in records]),
    )
