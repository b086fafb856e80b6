"""Stochastic gradient descent, plain and with heavy-ball momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpcore.spec.ops import UpdateSettings
from dpcore.spec.validate import decay, non_negative, plain, positive
from dpcore.stages.updates.base import WithoutSecondMoment


@dataclass(frozen=True)
class SGD(WithoutSecondMoment):
    """``x <- x - lr (g + weight_decay x)``."""

    lr: float
    weight_decay: float = 0.0
    rule: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        plain(self)
        positive(lr=self.lr)
        non_negative(weight_decay=self.weight_decay)

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr, self.weight_decay)


@dataclass(frozen=True)
class Momentum(WithoutSecondMoment):
    """``m <- momentum m + (g + weight_decay x);  x <- x - lr m``, as in torch.optim.SGD (no dampening)."""

    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    rule: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        plain(self)
        positive(lr=self.lr)
        decay(momentum=self.momentum)
        non_negative(weight_decay=self.weight_decay)

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr, self.weight_decay, beta1=self.momentum)
