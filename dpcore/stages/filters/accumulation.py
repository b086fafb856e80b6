"""The sum that turns released gradient differences back into a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpcore.errors import ArgumentError
from dpcore.spec.ops import FilterCoefficients
from dpcore.spec.validate import numbers


@dataclass(frozen=True)
class Accumulation:
    """``G_t = c_t G_{t-1} + x_t`` with ``c_0 = 0``, hence ``G_0 = x_0``.

    Parameters
    ----------
    decay : float or sequence of float
        c_t for every t >= 1, in [0, 1]; or c_0, c_1, ..., one a step, of which c_0 is taken as 0. At 1 the filter is
        the prefix sum, at 0 it does nothing.

    Raises
    ------
    ArgumentError
        If a decay lies outside [0, 1]; by `coefficients`, if the sequence ends before the step.

    Notes
    -----
    Under c < 1 a constant x accumulates to x / (1 - c): the gain is not 1, nor meant to be, for what comes in is
    ``grad(x_t) - c_t grad(x_{t-1})``.

    References
    ----------
    DP-SRG (Choquette-Choo, Ganesh, Thakurta), algorithm 3, line 6 (its line 7 adds the noise a second time, which x_t
    already carries), and algorithm 1, line 4, for c = 1.
    """

    decay: float | tuple[float, ...]
    order: ClassVar[int] = 1
    adaptive: ClassVar[bool] = False

    def __init__(self, decay: float | Sequence[float]) -> None:
        chosen = numbers(decay=decay)
        if chosen == ():
            raise ArgumentError("decay=[]: must hold one number a step")
        for value in chosen if isinstance(chosen, tuple) else (chosen,):
            if not 0 <= value <= 1:
                raise ArgumentError(f"decay={value!r}: must lie between 0 and 1")
        object.__setattr__(self, "decay", chosen)

    def at(self, step: int) -> float:
        """Return c_step."""
        if step == 0:
            return 0.0
        return self.decay[step] if isinstance(self.decay, tuple) else self.decay

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return b = (1,) and a = (-c_{step+1},), which acts inside the next output.

        Raises
        ------
        ArgumentError
            If the sequence of decays ends before `step`.
        """
        following = step + 1
        if isinstance(self.decay, tuple):
            if step >= len(self.decay):
                raise ArgumentError(
                    f"decay=<{len(self.decay)} numbers>: must hold one number a step, and step {following} is asked for"
                )
            following = following if following < len(self.decay) else 0
        return (FilterCoefficients((1.0,), (-self.at(following),)),)
