"""Stochastic gradient descent: plain, with heavy-ball momentum and with Nesterov's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpcore.spec.ops import UpdateSettings
from dpcore.spec.validate import Rules, decay, non_negative, positive
from dpcore.stages.updates.base import WithoutSecondMoment


@dataclass(frozen=True)
class SGD(WithoutSecondMoment):
    """``x <- x - lr (g + weight_decay x)``."""

    lr: float
    weight_decay: float = 0.0
    rule: ClassVar[str] = "sgd"
    rules: ClassVar[Rules] = {"lr": positive, "weight_decay": non_negative}

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
    rules: ClassVar[Rules] = {**SGD.rules, "momentum": decay}

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr, self.weight_decay, beta1=self.momentum)


@dataclass(frozen=True)
class Nesterov(Momentum):
    """``g <- g + weight_decay x;  m <- momentum m + g;  x <- x - lr (g + momentum m)`` (torch: nesterov=True)."""

    rule: ClassVar[str] = "nesterov"
