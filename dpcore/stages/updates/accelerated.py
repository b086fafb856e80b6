"""The coupling of Accelerated-DP-SRGD: Nesterov's method in its form with three sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dpcore.spec.ops import UpdateSettings
from dpcore.spec.validate import choice, plain, positive
from dpcore.stages.updates.base import WithoutSecondMoment

COUPLINGS = ("accelerated", "unaccelerated", "independent")


@dataclass(frozen=True)
class Accelerated(WithoutSecondMoment):
    """``z <- z - lr S;  y = x - (lr / eta_t) S;  x <- (1 - tau_{t+1}) y + tau_{t+1} z`` with lr = 1/beta.

    S is a weighted sum of gradients, ``eta_t = t + 1`` and ``tau_t = eta_t / sum_{j<=t} eta_j = 2 / (t + 2)``. The
    method's answer is y, which `dpcore.minimize` returns.

    Parameters
    ----------
    lr : float
        1 / beta; beta at least the smoothness constant.
    variant : {"accelerated", "unaccelerated", "independent"}
        "unaccelerated" takes the steps of y alone, ``x <- x - (lr / eta_t) S``; "independent" couples as the
        accelerated one, and expects a gradient g of the batch instead of S, which is then eta_t g.

    References
    ----------
    DP-SRG, algorithm 1 (Accelerated-DP-SRGD); its unaccelerated variant, section 4.3; independent batch gradients,
    theorem 4.11.
    """

    lr: float
    variant: str = "accelerated"
    rule: ClassVar[str] = "accelerated"

    def __post_init__(self) -> None:
        plain(self)
        positive(lr=self.lr)
        choice(COUPLINGS, variant=self.variant)

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr)

    def prepared(self, numbers: UpdateSettings, step: int, variances: Any) -> UpdateSettings:
        """Return the numbers with eta_t and tau_{t+1} of step t."""
        eta = step + 1.0
        rate = numbers.learning_rate * (eta if self.variant == "independent" else 1.0)
        coupling = 0.0 if self.variant == "unaccelerated" else 2.0 / (step + 3)
        return numbers._replace(learning_rate=rate, weight=eta, coupling=coupling)
