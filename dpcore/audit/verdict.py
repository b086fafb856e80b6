r"""From guesses about coins to a verdict on a claim: a test by betting, a lower bound on epsilon, an audit's result.

Both audits end here: that of a method (`dpcore.audit.auditing`), and that of a torch run
(`dpcore.torch.doctor.audit_run`). Canaries are in or out by fair coins of their own, and an adversary guesses each coin
from the releases.

**What a claim allows.** Let a release be (epsilon, delta(epsilon))-private with respect to a canary. A guess "in" with
error rates FPR and FNR then has ``1 - FNR <= FPR + delta(0)``, and the coin is fair, so

    P(right) = (1 - FPR + 1 - FNR) / 2 <= (1 + delta(0)) / 2.

A mu-Gaussian differentially private release (Dong, Roth, Su 2022) has ``delta(0) = 2 Phi(mu / 2) - 1``, hence
``P(right) <= Phi(mu / 2)``. So every claim allows what one of these allows, ``mu = 2 Phi^-1((1 + delta(0)) / 2)``.

**The wealth.** X_1, X_2, ... are shares of right guesses, between 0 and 1. Under the claim the expectation of X_t
given all that came before is at most ``p_t = Phi(mu_t / 2)``; for several guesses at once by linearity, *however* they
depend on each other. Bet a share theta in (0, 1] of the wealth on X_t being large: it is multiplied by
``1 + theta (X_t / p_t - 1)``, which is not negative, and under the claim has expectation at most 1 given the past. So
the product is a supermartingale that begins at 1, and so is W, the mean of such products over a fixed set of thetas.
Ville's inequality (1939): P(W_t >= 1 / alpha for some t) <= alpha. If W reaches 1 / alpha, the claim is refuted at
level alpha. This holds even if one stops there, earlier, or when time is short, and a guess may depend on everything
seen before.

**The bound.** Let claim r say ``p_t = Phi(r mu_t / 2)`` for all t: r times as much as planned. Each X_t / p_t falls
with r, so W(r) does, and the set of r that were ever refuted is an interval from 0 on. Its upper end is below the r of
the mechanism that ran with probability 1 - alpha, at all times together (a confidence sequence). A mechanism that
differs from step to step has no such r, and the bound is one for the largest of its steps.

**Epsilon.** If r is refuted, some guess is right with a probability above p, the smallest ``Phi(r mu_t / 2)``. The two
inequalities ``1 - FNR <= e^epsilon FPR + delta`` and ``1 - FPR <= e^epsilon FNR + delta`` (Kairouz, Oh, Viswanath 2015)
add up to ``2 P(right) <= 2 e^epsilon (1 - P(right)) + 2 delta``, so that *any* mechanism has

    epsilon >= log((p - delta) / (1 - p)).

That cannot exceed about the logarithm of the number of guesses. If the real mechanism is Gaussian, its epsilon is that
of r times the planned mu.

**False alarms.** Half of 1 - confidence belongs to the bets, half is shared equally by the direct checks
(`dpcore.audit.checks`): by the union bound a run as planned is flagged with probability at most 1 - confidence.

References
----------
Ville, "Etude critique de la notion de collectif", 1939; Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting", 2023; Dong, Roth and Su, "Gaussian Differential Privacy", 2022; Kairouz, Oh and Viswanath, "The
Composition Theorem for Differential Privacy", 2015, Theorem 2.1.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from dpcore.audit.checks import failed
from dpcore.plan.plan import Plan
from dpcore.spec.validate import open_unit

Floats = NDArray[np.float64]

THETAS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)
_LARGEST = 1e6


def log_wealth(shares: Floats, allowed: Floats) -> float:
    """Return the logarithm of W after shares X_t in [0, 1] of right guesses, if a claim allows p_t > 0 of them."""
    with np.errstate(divide="ignore"):  # theta = 1 loses all if nothing was right
        growth = np.log1p(np.outer(THETAS, shares / allowed - 1))
    return float(np.logaddexp.reduce(growth.sum(axis=1)) - math.log(len(THETAS)))


class RatioBound:
    """The confidence sequence of r, a mechanism's mu relative to the planned one; see the module."""

    def __init__(self, alpha: float) -> None:
        self.alpha = open_unit(alpha=alpha)
        self.shares, self.mus = np.empty(0), np.empty(0)
        self.lower = 0.0
        """The largest r refuted so far: the real mechanism's r is above it at confidence 1 - alpha, at all times."""

    def add(self, shares: Any, mu: float) -> None:
        """Add the share of right guesses, in [0, 1], of a release of planned mu > 0; or of several, in their order."""
        self.shares = np.append(self.shares, shares)
        self.mus = np.append(self.mus, np.full(np.size(shares), mu))
        if self._refutes(self.lower):
            low, high = self.lower, max(2 * self.lower, 1.0)
            while high < _LARGEST and self._refutes(high):
                low, high = high, 2 * high
            for _ in range(40):
                middle = (low + high) / 2
                low, high = (middle, high) if self._refutes(middle) else (low, middle)
            self.lower = low

    def _refutes(self, ratio: float) -> bool:
        return log_wealth(self.shares, ndtr(ratio * self.mus / 2)) >= -math.log(self.alpha)

    @property
    def refuted(self) -> bool:
        """Whether the claim itself, r = 1, was refuted at any time."""
        return self.lower >= 1.0

    def epsilon(self, delta: float) -> float:
        """Return the lower bound on the epsilon at `delta` of any mechanism, 0 or more."""
        right = float(ndtr(self.lower * self.mus.min() / 2))
        return math.log(max((right - delta) / (1 - right), 1.0))


@dataclass(frozen=True)
class AuditResult:
    """A lower bound on epsilon and the claim: of a method, or of a torch run.

    Attributes
    ----------
    claimed_epsilon : float
        The plan's epsilon at `delta`: an upper bound, by the accountant that gives the smallest.
    lower_bound : float or None
        Epsilon at `delta` is at least this, with the stated confidence, if `assumes` holds. None if no accountant has a
        lower end.
    lower_bound_any : float
        The same whatever mechanism ran: much smaller, at most about the log of the number of guesses.
    confidence : float
        The bound is too high, or a run as planned flagged, with probability at most 1 - confidence.
    ratio : float
        Lower bound of the real mu over the planned one, in the terms of `dpcore.audit.verdict`; 1 or more refutes.
    right, allowed : float
        The share of right guesses, and the expected share that the claim allows.
    canaries, steps : int
        For a method: all coins that were guessed, and the steps of a run. For a torch run: canaries in each step, and
        the steps that were taken until it was decided or time was over.
    noise_ratio : float
        Standard deviation of the noise on untouched coordinates, over the planned one.
    flagged, findings : bool, tuple of str
        Whether the run differs from the plan (the canaries were recognized better than the claim allows, or a direct
        check failed), and why, one sentence each.
    p_values : dict of str to float
        For each direct check: how likely the planned run shows something as unusual.
    half_refuted : bool or None
        For a torch run: whether it was refuted, at a tenth of the level, that a Gaussian mechanism with half the
        noise ran.
    """

    claimed_epsilon: float
    lower_bound: float | None
    lower_bound_any: float
    delta: float
    confidence: float
    ratio: float
    right: float
    allowed: float
    canaries: int
    steps: int
    noise_ratio: float
    flagged: bool
    findings: tuple[str, ...]
    p_values: dict[str, float]
    assumes: str
    method: str
    half_refuted: bool | None = None

    @property
    def decided(self) -> bool:
        """Whether the audit saw enough: the claim was refuted, or, of a run, half of its noise."""
        return self.flagged or self.half_refuted is not False

    @property
    def sentence(self) -> str:
        """One sentence on the bound and the claim."""
        bound = "unknown" if self.lower_bound is None else f"{self.lower_bound:.4g}"
        steps = "in runs of" if self.half_refuted is None else "in each of"
        half = ", and half the planned noise is refuted" if self.half_refuted else ""
        return (
            f"claimed epsilon {self.claimed_epsilon:.4g} at delta {self.delta:.3g}; lower bound {bound} at confidence "
            f"{self.confidence:g}, from {self.canaries} canaries {steps} {self.steps} steps: {self.right:.1%} "
            f"were guessed right, while the claim allows {self.allowed:.1%}{half}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return every number as JSON values; an infinite epsilon is None."""
        values = {**asdict(self), "findings": list(self.findings), "decided": self.decided}
        return {name: None if isinstance(v, float) and math.isinf(v) else v for name, v in values.items()}

    def __str__(self) -> str:
        """Return the result in sentences."""
        if self.flagged:
            end = f"FLAGGED: the run differs from the plan. {' '.join(self.findings)}"
        elif self.decided:
            end = (
                "Nothing contradicts the claim. That proves no privacy: an error that these canaries do not meet stays "
                "unseen."
            )
        else:
            end = "Not decided: too few steps to distinguish the planned noise from half of it."
        return f"{self.method}: {self.sentence} {end}"


def judged(
    plan: Plan,
    bound: RatioBound,
    p_values: dict[str, float],
    surprises: Sequence[str] = (),
    *,
    delta: float,
    confidence: float,
    **more: Any,
) -> AuditResult:
    """Return the result of an audit, from its bets and its direct checks; `more` are the other fields."""
    findings = [*failed(p_values, level_of(confidence, p_values)), *surprises]
    right, allowed = float(bound.shares.mean()), float(ndtr(bound.mus / 2).mean())
    if bound.refuted:
        findings.insert(0, f"Canaries were recognized as if the noise were at most 1/{bound.lower:.3g} of the planned.")
    return AuditResult(
        lower_bound_any=bound.epsilon(delta),
        delta=delta,
        confidence=confidence,
        ratio=bound.lower,
        right=right,
        allowed=allowed,
        flagged=bool(findings),
        findings=tuple(findings),
        p_values=p_values,
        method=plan.method.name,
        **more,
    )


def level_of(confidence: float, p_values: dict[str, float]) -> float:
    """Return the level of each direct check."""
    return (1 - confidence) / 2 / len(p_values)
