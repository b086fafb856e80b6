"""Direct checks beside the canaries: the noise on coordinates that nobody touches, and who took part in which step.

Each returns a probability: how likely the planned mechanism shows something at least as unusual. In units of the
planned noise, untouched coordinates are independent standard normals.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc, betainc, chdtr, chdtrc

Floats = NDArray[np.float64]


def too_little_noise(nulls: Floats) -> float:
    """Return the probability of noise as small as this at some step, or in all: chi-square, Bonferroni.

    Parameters
    ----------
    nulls : (R, L, D) array
        Releases on untouched coordinates.
    """
    squares = (nulls**2).sum(axis=(1, 2))
    each = nulls.shape[1] * nulls.shape[2]
    smallest = min(float(chdtr(each, squares.min())), float(chdtr(squares.size * each, squares.sum())))
    return float(min(1.0, (squares.size + 1) * smallest))


def repeated_noise(nulls: Floats) -> float:
    """Return the probability of so large a correlation between two steps or two tensors, Bonferroni over all pairs.

    For independent standard normal vectors of D entries the squared cosine of their angle is Beta(1/2, (D - 1)/2).
    Noise that is absent counts as no correlation; `too_little_noise` sees it.
    """
    rows = nulls.reshape(-1, nulls.shape[2])
    if rows.shape[0] < 2:
        return 1.0
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = (rows @ rows.T) / np.maximum(norms * norms.T, 1e-300)
    largest = min(1.0, float(np.abs(cosines[np.triu_indices(rows.shape[0], 1)]).max()))
    pairs = rows.shape[0] * (rows.shape[0] - 1) / 2
    # Pr[cosine^2 >= c^2] from its complement, which does not cancel near 1.
    tail = float(betainc((rows.shape[1] - 1) / 2, 0.5, 1 - largest**2))
    return min(1.0, pairs * tail)


def wrong_rate(used: int, trials: int, sample_rate: float) -> float:
    """Return the probability that so many or so few of `trials` coins of one probability fall on heads, two-sided."""
    if sample_rate >= 1:
        return 1.0 if used == trials else 0.0
    low = float(bdtr(used, trials, sample_rate))
    high = float(bdtrc(used - 1, trials, sample_rate)) if used else 1.0
    return min(1.0, 2 * min(low, high))


def wrong_spread(counts: NDArray[np.int64], tosses: int, sample_rate: float, *, low_only: bool = False) -> float:
    """Return the probability that numbers of heads in `tosses` coins each spread so little, or so much, two-sided.

    Parameters
    ----------
    counts : array of int
        Independent Bin(tosses, sample_rate) under the plan: how often each example took part, or the size of each
        batch.
    tosses : int
        Coins behind each count.
    sample_rate : float
        q.
    low_only : bool
        Look for too small a spread only: valid for counts that repel each other, too.

    Notes
    -----
    The sum of (count - k q)^2 is compared with the multiple of a chi-square of the same mean and variance; with
    v = k q (1 - q), one term has mean v and variance 2 v^2 + v (1 - 6 q (1 - q)).
    """
    variance = tosses * sample_rate * (1 - sample_rate)
    if variance == 0:
        return 1.0
    spread = 2 * variance**2 + variance * (1 - 6 * sample_rate * (1 - sample_rate))
    freedom = 2 * counts.size * variance**2 / spread
    total = float(((counts - tosses * sample_rate) ** 2).sum()) * freedom / (counts.size * variance)
    low = float(chdtr(freedom, total))
    if low_only:
        return low
    return min(1.0, 2 * min(low, float(chdtrc(freedom, total))))
