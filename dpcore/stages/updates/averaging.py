"""Averages of the parameters over time: functions of released parameters, so they cost no privacy."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from dpcore.spec import validate
from dpcore.spec.validate import Checked, Rules


class Averaging(Protocol):
    """``average <- average + weight (x - average)`` after every step."""

    def weight(self, step: int) -> float:
        """Return the weight of x_{step+1}, in (0, 1]; 1 at the first step."""


@dataclass(frozen=True)
class ExponentialAverage(Checked):
    """``a_t = sum_i (1 - decay) decay^{t-i} x_i / (1 - decay^t)`` over x_1 .. x_t: the weights add up to 1.

    Parameters
    ----------
    decay : float
        0 <= decay < 1.
    """

    decay: float = 0.999

    rules: ClassVar[Rules] = {"decay": validate.decay}

    def weight(self, step: int) -> float:
        """Return ``(1 - decay) / (1 - decay^{step+1})``."""
        return (1 - self.decay) / (1 - self.decay ** (step + 1))


@dataclass(frozen=True)
class UniformAverage(Checked):
    """The mean of all parameters after step `start` (Polyak and Ruppert); until then the parameters themselves.

    Parameters
    ----------
    start : int
        Number of steps that are left out.
    """

    start: int = 0

    rules: ClassVar[Rules] = {"start": partial(validate.integer, 0)}

    def weight(self, step: int) -> float:
        """Return 1 / (number of parameters averaged so far)."""
        return 1.0 if step < self.start else 1 / (step + 1 - self.start)
