"""Scores: how much a canary's releases speak for "in".

In units of the planned noise the releases x of one canary are N(s, I) with s = A p: column A_t is what it adds if it
takes part in step t, p_t says whether it does. Any score gives a valid lower bound; the likelihood ratio the best one.

- Batches are public: p is known, ``log N(x; s)/N(x; 0)`` grows with s.x, and s.x/|s| is normal with variance 1 and mean
  |s| or 0: the matched filter.
- Each of some steps draws it with probability q, and their columns are orthogonal:
  ``sum_t log(1 - q + q exp(A_t.x - |A_t|^2/2))``.
- Replace-one: "out" has -s instead of 0, and the ratio to it is taken.

An adversary who sees on untouched coordinates that the noise is not as planned uses the noise that there is: releases
are then first multiplied by the inverse root of its measured covariance (steps by steps). Untouched coordinates do not
depend on the coins, so neither does this choice.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dpcore.audit.records import Records

Floats = NDArray[np.float64]

# Noise below this, relative to the planned variance, is none.
_NO_NOISE = 1e-12


def known_participation(records: Records) -> Floats:
    """Return the matched filter's outputs, (m,); 0 for a canary that never takes part."""
    added = records.signal @ records.participation
    norms = np.linalg.norm(added, axis=0)
    return np.asarray((added * records.canaries).sum(axis=0) / np.where(norms > 0, norms, 1.0))


def secret_participation(records: Records, sample_rate: float, replaced: bool) -> Floats:
    """Return log-likelihood ratios where each possible step draws a canary with one probability, (m,)."""
    along = records.signal.T @ records.canaries
    size = (records.signal**2).sum(axis=0)[:, None]
    step = _log_ratio(along, size, sample_rate)
    if replaced:
        step = step - _log_ratio(-along, size, sample_rate)
    return np.asarray((step * records.possible).sum(axis=0))


def _log_ratio(along: Floats, size: Floats, q: float) -> Floats:
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-q), np.log(q) + along - size / 2))


def any_participation(records: Records) -> Floats:
    """Return the matched filter's outputs as if a canary took part in every possible step, (m,)."""
    return np.asarray(((records.signal @ records.possible) * records.canaries).sum(axis=0))


def whitened(records: Records, correlated: bool) -> Records:
    """Return the records in units of the noise on untouched coordinates, `correlated` between steps or not."""
    rows = records.nulls.reshape(records.nulls.shape[0], -1)
    covariance = rows @ rows.T / rows.shape[1]
    if not correlated:
        covariance = np.diag(np.diag(covariance))
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors / np.sqrt(np.maximum(values, _NO_NOISE))) @ vectors.T
    return replace(
        records,
        canaries=root @ records.canaries,
        nulls=np.tensordot(root, records.nulls, 1),
        signal=root @ records.signal,
    )
