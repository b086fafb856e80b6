"""Adam, AdamW and AdaGrad on the released gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpcore.errors import ArgumentError
from dpcore.spec.ops import UpdateSettings
from dpcore.spec.validate import Rules, decay, non_negative, positive, sequence
from dpcore.stages.updates.second_moment import SecondMoment


def _decays(betas: Any) -> tuple[float, float]:
    if len(sequence(betas=betas)) != 2:
        raise ArgumentError(f"betas={betas!r}: must be two numbers, the decays of the first and second moment")
    return decay(beta1=betas[0]), decay(beta2=betas[1])


@dataclass(frozen=True)
class Adam(SecondMoment):
    """Adam with bias-corrected moments; weight decay is added to the gradient (torch.optim.Adam).

    ``x <- x - lr muhat / (sqrt(nuhat) + eps)``; see `SecondMoment` for what nu is made of, and for other denominators.

    References
    ----------
    Kingma and Ba 2015, algorithm 1; as `post_processing` in the private adaptive optimizers paper.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    rule: ClassVar[str] = "adam"
    rules: ClassVar[Rules] = {**SecondMoment.rules, "betas": _decays, "eps": positive}

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr, self.weight_decay, *self.betas, self.eps)

    def bias(self, numbers: UpdateSettings, step: int, variances: NDArray[np.float64]) -> float:
        """Return ``(1 - beta2) sum_{i=1..t} beta2^{t-i} V_i / (1 - beta2^t)``, t = step + 1.

        The same average of V as nuhat is of the squares. As a recursion it is
        ``bias_t = [(beta2 - beta2^t) bias_{t-1} + (1 - beta2) V_t] / (1 - beta2^t)`` (algorithms.md 5, 10.8).
        """
        if variances.min() == variances.max():
            return float(variances[0])
        weights = numbers.beta2 ** np.arange(step, -1, -1.0)
        return float(weights @ variances / weights.sum())


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019; torch.optim.AdamW)."""

    weight_decay: float = 0.01
    rule: ClassVar[str] = "adamw"


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
