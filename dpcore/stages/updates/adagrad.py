"""AdaGrad on the released gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.ops import UpdateSettings
from dpcore.spec.validate import Rules, non_negative
from dpcore.stages.updates.second_moment import SecondMoment


@dataclass(frozen=True)
class AdaGrad(SecondMoment):
    """``nu <- nu + g^2;  x <- x - lr g / sqrt(nu)``, with 0/0 = 0; weight decay is added to the gradient.

    `eps` is added to the root, or, with ``denominator="floored"``, the least denominator (1 with independent moments).
    The other settings are those of `SecondMoment`.

    References
    ----------
    Private adaptive optimizers, algorithm 3.
    """

    lr: float
    eps: float = 0.0
    weight_decay: float = 0.0
    rule: ClassVar[str] = "adagrad"
    rules: ClassVar[Rules] = {**SecondMoment.rules, "eps": non_negative}

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr, self.weight_decay, eps=self.eps)

    def bias(self, numbers: UpdateSettings, step: int, variances: NDArray[np.float64]) -> float:
        """Return ``sum_{i<=t} V_i``."""
        return float(variances.sum())
