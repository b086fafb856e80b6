"""Averages of the parameters over time: functions of released parameters, so they cost no privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dpcore.spec.validate import decay, integer, plain


class Averaging(Protocol):
    """``average <- average + weight (x - average)`` after every step."""

    def weight(self, step: int) -> float:
        """Return the weight of x_{step+1}, in (0, 1]; 1 at the first step."""


@dataclass(frozen=True)
class ExponentialAverage:
    """``a_t = sum_i (1 - decay) decay^{t-i} x_i / (1 - decay^t)`` over x_1 .. x_t: the weights add up to 1.

    Parameters
    ----------
    decay : float
        0 <= decay < 1.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        plain(self)
        decay(decay=self.decay)

    def weight(self, step: int) -> float:
        """Return ``(1 - decay) / (1 - decay^{step+1})``."""
        return (1 - self.decay) / (1 - self.decay ** (step + 1))


@dataclass(frozen=True)
class UniformAverage:
    """The mean of all parameters after step `start` (Polyak and Ruppert); until then the parameters themselves.

    Parameters
    ----------
    start : int
        Number of steps that are left out.
    """

    start: int = 0

    def __post_init__(self) -> None:
        plain(self)
        integer(0, start=self.start)

    def weight(self, step: int) -> float:
        """Return 1 / (number of parameters averaged so far)."""
        return 1.0 if step < self.start else 1 / (step + 1 - self.start)
