"""The range in which a second moment can be debiased."""

from __future__ import annotations

import math
from typing import NamedTuple

from dpcore.spec.validate import decay, integer, non_negative, positive


class Regime(NamedTuple):
    """Two conditions; a condition holds where its ratio is at least `threshold`.

    `same_direction` is ``B / sigma`` against the threshold, for per-example gradients that point one way; `orthogonal`
    is ``sqrt(B) / sigma`` against it, for gradients that are orthogonal.
    """

    threshold: float
    same_direction: float
    orthogonal: float

    @property
    def trustworthy_if_same_direction(self) -> bool:
        """Whether the debiased second moment is seldom negative if all gradients of a batch point one way."""
        return self.same_direction >= self.threshold

    @property
    def trustworthy_if_orthogonal(self) -> bool:
        """Whether it is seldom negative even if the gradients of a batch are orthogonal."""
        return self.orthogonal >= self.threshold


def bias_correction_regime(batch_size: float, noise_multiplier: float, dimension: int, beta2: float = 0.999) -> Regime:
    """Return whether subtracting the noise's variance from Adam's second moment leaves a positive number.

    Parameters
    ----------
    batch_size : float
        B, the expected batch size.
    noise_multiplier : float
        sigma.
    dimension : int
        d, the number of parameters.
    beta2 : float
        Decay of the second moment, in [0, 1). The threshold is ``((1 - beta2)^2 / (1 - beta2^2))^(1/4) sqrt(d)``,
        0.15 sqrt(d) at 0.999.

    Notes
    -----
    The debiased moment of a coordinate with gradient g is g^2 plus an error whose standard deviation is, in the steady
    state and to leading order in the noise, ``s^2 sqrt(2 (1 - beta2) / (1 + beta2))`` with ``s = sigma C / B``. The
    paper's condition asks that s^2 times the root without the 2 be at most g^2, for g = C / sqrt(d) (same direction)
    or g = C / sqrt(B d) (orthogonal).

    References
    ----------
    On Design Principles for Private Adaptive Optimizers (Ganesh, McMahan, Thakurta), section 4 equations 2 and 3, and
    equation 6 for any beta2.
    """
    batch_size, sigma = positive(batch_size=batch_size), non_negative(noise_multiplier=noise_multiplier)
    beta2 = decay(beta2=beta2)
    threshold = ((1 - beta2) / (1 + beta2)) ** 0.25 * math.sqrt(integer(1, dimension=dimension))
    if sigma == 0:
        return Regime(threshold, math.inf, math.inf)
    return Regime(threshold, batch_size / sigma, math.sqrt(batch_size) / sigma)
