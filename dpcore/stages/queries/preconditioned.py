"""Scale-then-privatize: gradients scaled for each coordinate by released second moments, before they are clipped."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import ClassVar

from dpcore.errors import ArgumentError
from dpcore.spec.validate import Checked, Rules, integer, norm, positive
from dpcore.stages.queries.base import Outer, Plain, Point, Query


class Phase(Enum):
    """What a step does with the scale."""

    UNSCALED = "unscaled"
    REFRESHED = "refreshed"
    """Scaled by the second moment as it is at the beginning of this step."""
    FROZEN = "frozen"
    """Scaled as the step before was."""


@dataclass(frozen=True)
class Preconditioned(Checked, Outer):
    """``v_{t,i} = scale_t q_{t,i}``, ``scale_t = 1 / (sqrt(nuhat) + scale_eps)``; the noisy average is divided by it.

    Parameters
    ----------
    query : Query
        What is scaled: q.
    scale_eps : float
        Added to the root of the second moment, > 0.
    max_scaled_norm : float or None
        Clip norm of the scaled vectors, which have other units than gradients; None takes the clip's own.
    unscaled_steps, scaled_steps : int
        Cycles of so many unscaled steps, then so many steps scaled by the second moment that was reached when they
        begin. (0, 1) scales every step by the newest one: scale-then-privatize.

    Notes
    -----
    nuhat is the update's bias-corrected second moment, a function of earlier releases; the scale is public, and the
    scaled vector is clipped after it is formed, so an example moves the sum by at most `max_scaled_norm`. Noise has the
    noise multiplier times the norm in force at that step. Before the first step nuhat is 0.

    References
    ----------
    Private adaptive optimizers, section 3.4, algorithm 8, and the delayed preconditioner it is compared with there, of
    which docs/methods/dp_adam.md says how this one departs.
    """

    query: Query = field(default_factory=Plain)
    scale_eps: float = 1e-3
    max_scaled_norm: float | None = None
    unscaled_steps: int = 0
    scaled_steps: int = 1

    rules: ClassVar[Rules] = {
        "scale_eps": positive,
        "max_scaled_norm": norm,
        "unscaled_steps": partial(integer, 0),
        "scaled_steps": partial(integer, 1),
    }

    def __post_init__(self) -> None:
        if isinstance(self.query, Preconditioned):
            raise ArgumentError("query: is preconditioned already; scale once")
        super().__post_init__()

    @property
    def lags(self) -> int:
        """That of the inner query."""
        return self.query.lags

    def points(self, step: int) -> tuple[Point, ...]:
        """Return the inner query's points."""
        return self.query.points(step)

    def phase(self, step: int) -> Phase:
        """Return what step `step` does."""
        place = step % (self.unscaled_steps + self.scaled_steps) - self.unscaled_steps
        return Phase.UNSCALED if place < 0 else Phase.REFRESHED if place == 0 else Phase.FROZEN
