"""A lower bound on epsilon from counts of right and wrong guesses.

An adversary guesses "in" where a canary's score exceeds a threshold. Let FPR be the probability of that for a canary
that is out, FNR the probability of "out" for one that is in. A mechanism that is (epsilon, delta)-private allows

    1 - FNR <= e^epsilon FPR + delta    and, with the two data sets exchanged,    1 - FPR <= e^epsilon FNR + delta

(Kairouz, Oh, Viswanath 2015, Theorem 2.1), so that upper bounds on FPR and FNR give a lower bound on epsilon,

    epsilon >= max(log((1 - delta - FNR) / FPR), log((1 - delta - FPR) / FNR)).

The bounds are those of Clopper and Pearson: for k errors among n independent guesses, the p at which k or fewer errors
have probability alpha, ``Pr[Bin(n, p) <= k] = I_{1-p}(n - k, k + 1) = alpha``.

What a claim allows is its trade-off function: the largest power 1 - FNR at each FPR. A Gaussian mechanism with
parameter mu allows exactly ``Phi(Phi^{-1}(FPR) + mu)`` (Dong, Roth, Su 2022, eq. 6); read backwards, counts bound the
mu of a mechanism known to be Gaussian from below by ``Phi^{-1}(1 - FNR) - Phi^{-1}(FPR)`` (Nasr et al., "Tight Auditing
of Differentially Private Machine Learning", 2023, section 4). Any other event allows at most what its delta(epsilon)
does, at every epsilon at once:

    power <= min over epsilon of  min(e^epsilon FPR + delta(epsilon), 1 - e^-epsilon (1 - delta(epsilon) - FPR)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr, ndtri

from dpcore import accounting
from dpcore.accounting import Event
from dpcore.accounting.phases import phases

Floats = NDArray[np.float64]

# Probabilities are kept this far from 0 and 1, where the normal quantile is infinite.
_EDGE = 1e-15


@dataclass(frozen=True)
class Errors:
    """Guesses about canaries at one threshold, or at several.

    The upper bounds on both error rates hold together, but with probability `alpha`.
    """

    false_positives: Any
    outs: int
    false_negatives: Any
    ins: int
    alpha: float

    @property
    def fpr(self) -> Any:
        """Upper bound on the false positive rate."""
        return clopper_pearson_upper(self.false_positives, self.outs, self.alpha / 2)

    @property
    def fnr(self) -> Any:
        """Upper bound on the false negative rate."""
        return clopper_pearson_upper(self.false_negatives, self.ins, self.alpha / 2)

    @property
    def mu(self) -> Any:
        """Lower bound on mu of a Gaussian mechanism, 0 or more."""
        return np.maximum(0.0, -_quantile(self.fnr) - _quantile(self.fpr))

    def epsilon(self, delta: float) -> float:
        """Lower bound on the epsilon at `delta` of any mechanism, 0 or more."""
        fpr, fnr = float(self.fpr), float(self.fnr)
        ratios = [(1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr]
        return max([0.0, *(math.log(ratio) for ratio in ratios if ratio > 0)])


@dataclass(frozen=True)
class Claim:
    """What an event says an adversary can do.

    `mu` is that of the Gaussian mechanism that the event is as a whole; where batches are drawn in secret there are
    points of its privacy curve instead, certified upper bounds.
    """

    event: Event
    mu: float | None
    epsilons: Floats
    deltas: Floats

    @classmethod
    def of(cls, event: Event, largest_epsilon: float, points: int = 16) -> Claim:
        """Evaluate the claim of an event at `points` epsilons up to `largest_epsilon`."""
        found = phases(event)
        if found is not None and not found.steps:
            return cls(event, found.mu, np.empty(0), np.empty(0))
        epsilons = np.linspace(0, max(largest_epsilon, 0.1), points)
        return cls(event, None, epsilons, np.array(_deltas(event, tuple(epsilons.tolist()))))

    def power(self, fpr: Any) -> Any:
        """Return the largest true positive rate that the claim allows at these false positive rates."""
        fpr = np.asarray(fpr, dtype=np.float64)
        if self.mu is not None:
            return ndtr(_quantile(fpr) + self.mu)
        grown, shrunk = np.exp(self.epsilons), np.exp(-self.epsilons)
        alpha = fpr[..., None]
        bounds = np.minimum(alpha * grown + self.deltas, 1 - shrunk * (1 - self.deltas - alpha))
        return np.clip(bounds.min(axis=-1), 0.0, 1.0)

    def excess(self, errors: Errors) -> Any:
        """Return by how much the errors' certified power exceeds the claim's, in normal quantiles; positive refutes."""
        return -_quantile(errors.fnr) - _quantile(self.power(errors.fpr))


@lru_cache(maxsize=16)
def _deltas(event: Event, epsilons: tuple[float, ...]) -> tuple[float, ...]:
    names = accounting.accountants_for(event)
    return tuple(min(accounting.delta(event, epsilon, name) for name in names) for epsilon in epsilons)


def clopper_pearson_upper(count: Any, total: int, alpha: float) -> Any:
    """Return the upper end of a one-sided confidence interval for a probability; 1 where nothing was counted."""
    count = np.asarray(count)
    # I_p(k + 1, n - k) = Pr[Bin(n, p) > k] = 1 - alpha.
    inside = np.minimum(count, max(total - 1, 0))
    bound = betaincinv(inside + 1.0, np.maximum(total - inside, 1.0), 1 - alpha)
    return np.where(count >= total, 1.0, bound)


def best_threshold(ins: Floats, outs: Floats, claim: Claim, alpha: float) -> float:
    """Return the threshold at which scores exceed a claim the most; these scores are not to be counted again."""
    scores = np.sort(np.concatenate([ins, outs]))
    middles = np.unique((scores[1:] + scores[:-1]) / 2) if scores.size > 1 else np.zeros(1)
    errors = count_errors(ins, outs, middles, alpha)
    excess = np.asarray(claim.excess(errors))
    best = np.flatnonzero(excess >= excess.max() - 1e-12)
    return float(middles[best[best.size // 2]])


def count_errors(ins: Floats, outs: Floats, threshold: Any, alpha: float) -> Errors:
    """Return the errors of guessing "in" above a threshold, or above each of several."""
    positives = outs.size - np.searchsorted(np.sort(outs), threshold, side="right")
    negatives = np.searchsorted(np.sort(ins), threshold, side="right")
    return Errors(positives, outs.size, negatives, ins.size, alpha)


def _quantile(probability: Any) -> Any:
    return ndtri(np.clip(probability, _EDGE, 1 - _EDGE))
