"""DiSK's query: the gradient predicted from two points along the last displacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from dpcore.errors import ArgumentError
from dpcore.spec.validate import Checked, Rules, fraction, number
from dpcore.stages.queries.base import Point


@runtime_checkable
class Gain(Protocol):
    """A weight that changes from step to step, as `dpcore.filters.ScalarKalman`'s."""

    def gain(self, step: int) -> float:
        """Return the weight of step `step` (from 0), in (0, 1]."""


@dataclass(frozen=True)
class TwoPoint(Checked):
    """``v_{t,i} = w_t grad(x_t + gamma d_{t-1}; i) + (1 - w_t) grad(x_t; i)``, ``w_t = (1 - k_t) / (k_t gamma)``.

    Parameters
    ----------
    kappa : float or Gain
        Weight k of the new private gradient in the averaging filter that follows, in (0, 1]. At 1 the query is plain.
        Or that filter itself where its weight k_t changes: anything with ``gain(step)``.
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

    kappa: float | Gain
    gamma: float

    lags: ClassVar[int] = 0
    rules: ClassVar[Rules] = {"gamma": number}

    def __post_init__(self) -> None:
        super().__post_init__()
        changes = isinstance(self.kappa, Gain)
        if not changes:
            object.__setattr__(self, "kappa", fraction(kappa=self.kappa))
        if self.gamma == 0 and self.kappa != 1:
            remedy = "leave the query plain" if changes else f"use doppler(a=[{self.kappa - 1:g}], b=[{self.kappa:g}])"  # type: ignore[operator]
            raise ArgumentError(
                f"gamma={self.gamma!r}: must not be 0, where the two points coincide; for averaging without a "
                f"prediction {remedy}"
            )

    def weight(self, step: int) -> float:
        """Return w_step, the weight of the displaced point."""
        k = self.kappa.gain(step) if isinstance(self.kappa, Gain) else self.kappa
        return 0.0 if step == 0 or k == 1 else (1 - k) / (k * self.gamma)

    @property
    def uses_displacement(self) -> bool:
        """Whether a displaced point is ever asked for."""
        return self.kappa != 1

    def points(self, step: int) -> tuple[Point, ...]:
        """Return one or two points."""
        w = self.weight(step)
        if w == 0:
            return (Point(1.0),)
        displaced = Point(w, self.gamma)
        return (displaced,) if w == 1 else (displaced, Point(1 - w))
