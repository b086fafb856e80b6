"""Learning-rate schedules: a factor for every step, on top of each parameter group's own learning rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from dpcore.errors import ArgumentError
from dpcore.spec.validate import Checked, Rules, integer, non_negative, open_unit, positive


class Schedule(Protocol):
    """Depends on the step's number only, `Doubling` on releases too: it costs no privacy."""

    def factor(self, step: int, steps: int) -> float:
        """Return the learning rate's factor at step `step` (from 0) of `steps` planned ones."""

    def check(self, steps: int) -> None:
        """Refuse a run that the schedule does not fit."""


def is_adaptive(schedule: Schedule | None) -> bool:
    """Return whether the schedule depends on releases, as `Doubling` does."""
    return bool(getattr(schedule, "adaptive", False))


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


@dataclass(frozen=True)
class Doubling(Checked):
    """Finds the learning rate in the released gradients, and lets it fall to 0 at the end: no search, no privacy.

    The rate begins where the first step has length ``lr / sqrt(steps)``, whatever the clip norm. Then it doubles
    whenever the releases are evidence that the parameters should have moved farther since the last change, and is
    divided by the cube root of 2 when they moved too far.

    Parameters
    ----------
    confidence : float
        Standard deviations of the evidence's noise that a change takes.
    decay : float
        Share of the steps, at the end, in which the rate falls in a line to 0 and is not changed otherwise.

    Notes
    -----
    Let y be the parameters at the last change, ``D_t = x_t - y``, and ``g_t = mu_t + s z_t`` the release of step t,
    with the known deviation s of its noise in a coordinate. x_t and y are functions of earlier releases, and z_t is
    independent of them. So ``<g_t, D_t>`` has expectation ``<mu_t, D_t>`` and noise of deviation ``s ||D_t||``, however
    many coordinates there are. The noise of different steps adds up in squares:

        E = sum <g_t, D_t>,    V = sum s^2 ||D_t||^2.

    ``<mu_t, D_t>`` is the loss's slope along the line from y through x_t: negative where a longer way would have been
    better. If ``E < -confidence sqrt(V)`` the rate doubles, if ``E > confidence sqrt(V)`` it falls; then y = x_t.
    Where mu is 0, E is a martingale of variance V.

    The noise of sampling is in E, too, but not in V, since its variance is private. The rate rises faster than it
    falls: a rate too high for a while costs little, since the decay takes it down. Of the rules that were compared
    (docs/studies/rates.py), DoG and Prodigy take ``||x_t - x_0||`` for a distance, to which the noise of every
    coordinate adds.
    """

    confidence: float = 2.0
    decay: float = 0.5
    adaptive: ClassVar[bool] = True

    rules: ClassVar[Rules] = {"confidence": positive, "decay": open_unit}

    def check(self, steps: int) -> None:
        """Refuse nothing: it fits every run."""

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of the decay alone."""
        return min(1.0, (steps - step) / self._falling(steps))

    def searches(self, step: int, steps: int) -> bool:
        """Return whether the decay has not begun."""
        return step < steps - self._falling(steps)

    def _falling(self, steps: int) -> int:
        return max(1, int(self.decay * steps))

    def initial(self) -> tuple[float, ...]:
        """Return the statistics before the first step: the factor found, 0 for none yet, E and V."""
        return (0.0, 0.0, 0.0)

    def begin(self, power: float, steps: int) -> tuple[float, ...]:
        """Return the statistics of a first step of length ``lr / sqrt(steps)``, from the release's squared norm."""
        return (1 / math.sqrt(power * steps), 0.0, 0.0) if 0 < power < math.inf else self.initial()

    def observe(self, statistics: Sequence[float], product: float, variance: float) -> tuple[float, ...]:
        """Return the statistics with ``<g_t, D_t>`` and its noise's variance taken in; E = V = 0 after a change."""
        factor, evidence, noise = statistics[0], statistics[1] + product, statistics[2] + variance
        limit = self.confidence * math.sqrt(noise)
        if evidence < -limit:
            return (min(2 * factor, _LARGEST), 0.0, 0.0)
        # So written that NaN, of parameters that diverged, is too far.
        return (factor, evidence, noise) if evidence <= limit < math.inf else (factor * 0.5 ** (1 / 3), 0.0, 0.0)


FIRST_LR = 0.1  #: of `Doubling`, where none is given
_LARGEST = 1e100  # a loss without a minimum must not make the state infinite
