"""Stochastic recursive gradients: what changed between the last two parameter points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dpcore.errors import ArgumentError
from dpcore.spec.validate import Checked, Rules, unit_intervals
from dpcore.stages.queries.base import Outer, Plain, Point, Query, combined, delayed, lags_behind


@dataclass(frozen=True)
class RecursiveDifference(Checked, Outer):
    """``v_{t,i} = grad(x_t; i) - c_t grad(x_{t-1}; i)`` with c_0 = 0, formed before its norm is taken.

    Parameters
    ----------
    decay : float or sequence of float
        c, or c_0, c_1, ... of every step (c_0 is taken as 0), each in [0, 1]. It must be that of the accumulation that
        follows (`dpcore.filters.Accumulation`).
    query : Query
        What is asked at both points; the plain gradient by default.

    References
    ----------
    DP-SRG, algorithm 3 (DP-SRG-MEMF).
    """

    decay: float | Sequence[float]
    query: Query = field(default_factory=Plain)
    rules: ClassVar[Rules] = {"decay": unit_intervals}

    @property
    def lags(self) -> int:
        """Earlier points kept."""
        return lags_behind(self.query, 0 if self.decay == 0 else 1)

    def points(self, step: int) -> tuple[Point, ...]:
        """Return two points, one at the first step."""
        c = 0.0 if step == 0 else self._decay(step)
        before = () if c == 0 else delayed(self.query.points(step - 1), -c, 1)
        return combined((*self.query.points(step), *before))

    def _decay(self, step: int) -> float:
        if isinstance(self.decay, float):
            return self.decay
        if step >= len(self.decay):
            raise ArgumentError(f"decay: has {len(self.decay)} steps and the run goes on; give one number for each")
        return self.decay[step]


@dataclass(frozen=True)
class AcceleratedDifference:
    """``v_{t,i} = eta_t grad(x_t; i) - eta_{t-1} grad(x_{t-1}; i)`` with ``eta_t = t + 1`` and ``eta_{-1} = 0``.

    References
    ----------
    DP-SRG, algorithm 1 (Accelerated-DP-SRGD).
    """

    uses_displacement: ClassVar[bool] = False
    lags: ClassVar[int] = 1

    def points(self, step: int) -> tuple[Point, ...]:
        """Return two points, one at the first step."""
        here = Point(float(step + 1))
        return (here, Point(-float(step), lag=1)) if step > 0 else (here,)
