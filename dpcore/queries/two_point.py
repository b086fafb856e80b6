"""DiSK's query: the gradient predicted from two points along the last displacement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dpcore.errors import ArgumentError
from dpcore.queries.base import Point
from dpcore.validate import fraction, number


@dataclass(frozen=True)
class TwoPoint:
    """``v_{t,i} = w grad(x_t + gamma d_{t-1}; i) + (1 - w) grad(x_t; i)`` with ``w = (1 - kappa) / (kappa gamma)``.

    Parameters
    ----------
    kappa : float
        Weight of the new private gradient in the averaging filter that follows, in (0, 1]. At 1 the query is plain.
    gamma : float
        How far along the last displacement the second gradient is taken; any number but 0. At -1 it is taken at
        x_{t-1}, and the method is STORM.

    Notes
    -----
    The first step has no displacement and asks for the plain gradient. Where ``w`` is 1 only one gradient is needed.

    References
    ----------
    DiSK (Zhang et al.), algorithm 3. Section 4.2 prints ``x_t - gamma d``; the sign here is algorithm 3's.
    """

    kappa: float
    gamma: float

    def __post_init__(self) -> None:
        fraction(kappa=self.kappa)
        if number(gamma=self.gamma) == 0 and self.kappa != 1:
            raise ArgumentError(
                f"gamma={self.gamma!r}: must not be 0, where the two points coincide; for averaging without a "
                f"prediction use doppler(a=[{self.kappa - 1:g}], b=[{self.kappa:g}])"
            )

    @cached_property
    def weight(self) -> float:
        """The weight w of the displaced point."""
        return 0.0 if self.kappa == 1 else (1 - self.kappa) / (self.kappa * self.gamma)

    @property
    def uses_displacement(self) -> bool:
        """Whether a displaced point is ever asked for."""
        return self.weight != 0

    @property
    def lags(self) -> int:
        """0: the displacement is kept instead."""
        return 0

    def points(self, step: int) -> tuple[Point, ...]:
        """Return one or two points."""
        if step == 0 or self.weight == 0:
            return (Point(1.0),)
        displaced = Point(self.weight, self.gamma)
        return (displaced,) if self.weight == 1 else (displaced, Point(1 - self.weight))
