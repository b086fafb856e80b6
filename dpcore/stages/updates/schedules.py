"""Learning-rate schedules: a public factor for every step, on top of each parameter group's own learning rate."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from dpcore.errors import ArgumentError
from dpcore.spec.validate import Checked, Rules, integer, non_negative


class Schedule(Protocol):
    """Depends on the step's number only: it costs no privacy."""

    def factor(self, step: int, steps: int) -> float:
        """Return the learning rate's factor at step `step` (from 0) of `steps` planned ones."""

    def check(self, steps: int) -> None:
        """Refuse a run that the schedule does not fit."""


@dataclass(frozen=True)
class WarmupCosine(Checked):
    """Linear from 1/warmup_steps to 1, then half a cosine from 1 to `final` at the last step.

    Parameters
    ----------
    warmup_steps : int
        0 begins at the full learning rate.
    final : float
        Factor at the last step, 0 <= final.
    """

    warmup_steps: int = 0
    final: float = 0.0

    rules: ClassVar[Rules] = {"warmup_steps": partial(integer, 0), "final": non_negative}

    def check(self, steps: int) -> None:
        """Refuse a warm-up that fills the whole run."""
        if self.warmup_steps >= steps:
            raise ArgumentError(
                f"warmup_steps={self.warmup_steps!r}: must be less than the {steps} steps of the run; "
                f"{steps // 10} is a tenth of it"
            )

    def factor(self, step: int, steps: int) -> float:
        """Return the factor."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(steps - 1 - self.warmup_steps, 1)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
