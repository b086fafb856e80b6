"""Recurrences of order one: DiSK's average, and the sum that turns gradient differences back into a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpcore.errors import ArgumentError
from dpcore.spec.ops import FilterCoefficients
from dpcore.spec.validate import Checked, Rules, fraction, unit_intervals


@dataclass(frozen=True)
class Averaging(Checked):
    """``g~_t = (1 - kappa) g~_{t-1} + kappa g_t`` with ``g~_{-1} := g_0``, hence ``g~_0 = g_0``.

    Parameters
    ----------
    kappa : float
        Weight of the new gradient, in (0, 1].

    Notes
    -----
    Starting at g_0 instead of 0 is the recurrence with b_0 = 1 at the first step, so it needs no state of its own.

    References
    ----------
    DiSK (Zhang et al.), algorithm 3.
    """

    kappa: float
    order: ClassVar[int] = 1
    adaptive: ClassVar[bool] = False
    rules: ClassVar[Rules] = {"kappa": fraction}

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return b = (kappa,), or (1,) at the first step, and a = (-(1 - kappa),)."""
        return (FilterCoefficients((1.0 if step == 0 else self.kappa,), (self.kappa - 1,)),)


@dataclass(frozen=True)
class Accumulation(Checked):
    """``G_t = c_t G_{t-1} + x_t`` with ``c_0 = 0``, hence ``G_0 = x_0``.

    Parameters
    ----------
    decay : float or sequence of float
        c_t for every t >= 1, in [0, 1]; or c_0, c_1, ..., one a step, of which c_0 is taken as 0. At 1 the filter is
        the prefix sum, at 0 it does nothing. Under c < 1 a constant x accumulates to x / (1 - c): the gain is not 1,
        for what comes in is ``grad(x_t) - c_t grad(x_{t-1})``.

    References
    ----------
    DP-SRG (Choquette-Choo, Ganesh, Thakurta), algorithm 3, line 6 (its line 7 adds the noise a second time, which x_t
    already carries), and algorithm 1, line 4, for c = 1.
    """

    decay: float | Sequence[float]
    order: ClassVar[int] = 1
    adaptive: ClassVar[bool] = False
    rules: ClassVar[Rules] = {"decay": unit_intervals}

    def at(self, step: int) -> float:
        """Return c_step."""
        if step == 0:
            return 0.0
        return self.decay if isinstance(self.decay, float) else self.decay[step]

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return b = (1,) and a = (-c_{step+1},), which acts inside the next output.

        Raises
        ------
        ArgumentError
            If the sequence of decays ends before `step`.
        """
        following = step + 1
        if not isinstance(self.decay, float):
            if step >= len(self.decay):
                raise ArgumentError(
                    f"decay=<{len(self.decay)} numbers>: must hold one number a step, and step {following} is asked for"
                )
            following = following if following < len(self.decay) else 0
        return (FilterCoefficients((1.0,), (-self.at(following),)),)
