"""Adam and AdamW on the released gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpcore.errors import ArgumentError
from dpcore.spec.ops import UpdateSettings
from dpcore.validate import decay, non_negative, positive


@dataclass(frozen=True)
class Adam:
    """Adam with bias-corrected moments; weight decay is added to the gradient (torch.optim.Adam).

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
        positive(lr=self.lr)
        if len(self.betas) != 2:
            raise ArgumentError(f"betas={self.betas!r}: must be two numbers, the decays of the first and second moment")
        object.__setattr__(self, "betas", (decay(beta1=self.betas[0]), decay(beta2=self.betas[1])))
        positive(eps=self.eps)
        non_negative(weight_decay=self.weight_decay)

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr, self.weight_decay, *self.betas, self.eps)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019; torch.optim.AdamW)."""

    weight_decay: float = 0.01
    rule: ClassVar[str] = "adamw"
