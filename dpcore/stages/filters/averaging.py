"""DiSK's exponential average, which starts at the first released gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpcore.spec.ops import FilterCoefficients
from dpcore.spec.validate import fraction, plain


@dataclass(frozen=True)
class Averaging:
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

    def __post_init__(self) -> None:
        plain(self)
        fraction(kappa=self.kappa)

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return b = (kappa,), or (1,) at the first step, and a = (-(1 - kappa),)."""
        return (FilterCoefficients((1.0 if step == 0 else self.kappa,), (self.kappa - 1,)),)
