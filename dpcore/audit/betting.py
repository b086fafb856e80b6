r"""A sequential test by betting: it may be looked at after every step, and stopped whenever one likes.

In each step fresh canaries are in or out by fair coins of their own, and an adversary guesses each coin from what the
step releases, and from all that was released before. X_t is the share of right guesses, between 0 and 1.

**What a claim allows.** Let a step's release be mu-Gaussian differentially private with respect to each canary, given
the past and the other canaries. A guess "in" has error rates FPR and FNR with ``1 - FNR <= Phi(Phi^{-1}(FPR) + mu)``
(Dong, Roth, Su 2022), and the coin is fair, so

    P(right) = (1 - FPR + 1 - FNR) / 2 <= max over a of (1 - a + Phi(Phi^{-1}(a) + mu)) / 2 = Phi(mu / 2),

where the maximum is at ``a = Phi(-mu / 2)``: there the derivative of the power is 1. By linearity the expectation of
X_t given the past is at most ``p_t = Phi(mu_t / 2)``, *however* the guesses of one step depend on each other. No step
need be Gaussian, and later steps, canaries and guesses may depend on earlier ones.

**The wealth.** Bet a share theta in (0, 1] of the wealth on X_t being large: it is multiplied by
``1 + theta (X_t / p_t - 1)``, which is not negative, and under the claim has expectation at most 1 given the past. So
the product over steps is a supermartingale that begins at 1, and so is W, the mean of such products over a fixed set
of thetas. Ville's inequality (1939): P(W_t >= 1 / alpha for some t) <= alpha. Where W reaches 1 / alpha the claim is
refuted at level alpha; to stop there, earlier, or when time is short changes nothing of that.

**The bound.** Let claim r say ``p_t = Phi(r mu_t / 2)`` for all t: r times as much as planned. Each X_t / p_t falls
with r, so W(r) does, and the set of r that were ever refuted is an interval from 0 on. Its upper end is below the r of
the mechanism that ran with probability 1 - alpha, at all times together (a confidence sequence). A mechanism that
differs from step to step has no such r, and the bound is one for the largest of its steps.

References
----------
Ville, "Etude critique de la notion de collectif", 1939; Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting", 2023; Dong, Roth and Su, "Gaussian Differential Privacy", 2022.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, ndtr

from dpcore.spec.validate import open_unit

Floats = NDArray[np.float64]

THETAS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)
_LARGEST = 1e6


class Bets:
    """Bets that the shares of right guesses exceed what a claim allows in expectation."""

    def __init__(self, alpha: float) -> None:
        self.alpha = open_unit(alpha=alpha)
        self._shares: list[float] = []
        self._allowed: list[float] = []

    def add(self, share: float, allowed: float) -> None:
        """Add a step: the share X_t in [0, 1], and the expectation p_t > 0 that the claim allows."""
        self._shares.append(share)
        self._allowed.append(allowed)

    def log_wealth(self) -> float:
        """Return the logarithm of W after all steps so far; it is added up anew, for the thetas are few."""
        return _log_wealth(np.array(self._shares), np.array(self._allowed))

    @property
    def refuted(self) -> bool:
        """Whether W is at 1 / alpha or more now. One that stops there has refuted the claim at level alpha."""
        return self.log_wealth() >= -math.log(self.alpha)


class RatioBound:
    """The confidence sequence of r, how many times as much as planned a mechanism tells; see the module."""

    def __init__(self, alpha: float) -> None:
        self.alpha = open_unit(alpha=alpha)
        self._shares: list[float] = []
        self._mus: list[float] = []
        self.lower = 0.0
        """The largest r refuted so far: r of what ran is above it at confidence 1 - alpha, at all times together."""

    def add(self, share: float, mu: float) -> None:
        """Add a step: the share of right guesses, in [0, 1], and the planned mu > 0 of its release."""
        self._shares.append(share)
        self._mus.append(mu)
        if self._refutes(self.lower):
            low, high = self.lower, max(2 * self.lower, 1.0)
            while high < _LARGEST and self._refutes(high):
                low, high = high, 2 * high
            for _ in range(40):
                middle = (low + high) / 2
                low, high = (middle, high) if self._refutes(middle) else (low, middle)
            self.lower = low

    def _refutes(self, ratio: float) -> bool:
        allowed = ndtr(ratio * np.array(self._mus) / 2)
        return _log_wealth(np.array(self._shares), allowed) >= -math.log(self.alpha)

    @property
    def refuted(self) -> bool:
        """Whether the claim itself, r = 1, was refuted at any time."""
        return self.lower >= 1.0


def _log_wealth(shares: Floats, allowed: Floats) -> float:
    with np.errstate(divide="ignore"):  # theta = 1 loses all where nothing was right
        growth = np.log1p(np.outer(THETAS, shares / allowed - 1))
    return float(logsumexp(growth.sum(axis=1)) - math.log(len(THETAS)))
