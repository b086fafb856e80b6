"""Adam and AdamW on the released gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dpcore.errors import ArgumentError
from dpcore.spec.ops import UpdateSettings
from dpcore.spec.validate import decay, non_negative, plain, positive, sequence
from dpcore.stages.updates.second_moment import SecondMoment


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

    def __post_init__(self) -> None:
        plain(self)
        positive(lr=self.lr)
        if len(sequence(betas=self.betas)) != 2:
            raise ArgumentError(f"betas={self.betas!r}: must be two numbers, the decays of the first and second moment")
        object.__setattr__(self, "betas", (decay(beta1=self.betas[0]), decay(beta2=self.betas[1])))
        positive(eps=self.eps)
        non_negative(weight_decay=self.weight_decay)
        self._check(self.eps)

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr, self.weight_decay, *self.betas, self.eps)

    def prepared(self, numbers: UpdateSettings, step: int, variances: NDArray[np.float64] | None) -> UpdateSettings:
        """Return the numbers with the noise's share of nuhat as `bias`, and eps as `floor` where it is one.

        With V_i the variance of the noise in step i's direction and t = step + 1,
        ``bias_t = (1 - beta2) sum_{i=1..t} beta2^{t-i} V_i / (1 - beta2^t)``: the same average of V as nuhat is of the
        squares, so that ``E[nuhat - bias]`` is what nuhat would be without noise. As a recursion it is
        ``bias_t = [(beta2 - beta2^t) bias_{t-1} + (1 - beta2) V_t] / (1 - beta2^t)`` (algorithms.md 5, 10.8).
        """
        if self.denominator == "floored":
            numbers = numbers._replace(eps=0.0, floor=numbers.eps)
        if not self.bias_corrected:
            return numbers
        assert variances is not None
        seen = variances[: step + 1]
        if seen.min() == seen.max():
            return numbers._replace(bias=float(seen[0]))
        weights = numbers.beta2 ** np.arange(step, -1, -1.0)
        return numbers._replace(bias=float(weights @ seen / weights.sum()))


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019; torch.optim.AdamW)."""

    weight_decay: float = 0.01
    rule: ClassVar[str] = "adamw"
