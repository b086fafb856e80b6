"""The query stage: at which parameter points each example's gradients are taken, and with which weights."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.validate import Checked, Rules, decay, fraction, integer, norm, number, positive, unit_intervals
from dpcore.stages.checked_steps import checked_steps

__all__ = [
    "AcceleratedDifference", "ParameterWindow", "Phase", "Plain", "Point", "Preconditioned", "Query",
    "RecursiveDifference", "TwoPoint",
]  # fmt: skip


class Point(NamedTuple):
    """A gradient that is taken at ``x_{t-lag} + displacement * d_{t-lag-1}`` and enters the combination times `weight`.

    d_{t-1} = x_t - x_{t-1} is the last displacement; d_{-1} is 0.
    """

    weight: float
    displacement: float = 0.0
    lag: int = 0


class Query(Protocol):
    """The vector of example i at step t: ``v_{t,i} = sum_j weight_j grad(x_{t-lag_j} + displacement_j d_{...}; i)``.

    The points are functions of earlier releases, and the combination is clipped once, after it is formed: whatever the
    weights, one example moves the sum by at most the clip norm.
    """

    @property
    def uses_displacement(self) -> bool:
        """Whether d_{t-1} = x_t - x_{t-1} must be kept."""

    @property
    def lags(self) -> int:
        """How many earlier parameter points x_{t-1}, x_{t-2}, ... must be kept."""

    def points(self, step: int) -> tuple[Point, ...]:
        """Return the points of step `step` (from 0); their lags are at most `step`."""


@dataclass(frozen=True)
class Plain:
    """``v_{t,i} = grad(x_t; i)``, as in DP-SGD."""

    uses_displacement: ClassVar[bool] = False
    lags: ClassVar[int] = 0

    def points(self, step: int) -> tuple[Point, ...]:
        """Return the one point x_t."""
        return (Point(1.0),)


def check_query(query: Query, steps: int) -> None:
    """Refuse a query whose points cannot be taken: the caller's own query may break its promises.

    All steps up to `dpcore.stages.checked_steps.CHECKED_STEPS` are checked, and the last.
    """
    name = f"query={type(query).__name__}(...)"
    window = widest_window(query)
    if window is not None and window > steps:
        raise ArgumentError(
            f"window={window:,}: must be at most {steps:,}, the steps of the run, which has no more parameter points"
        )
    integer(0, **{f"{name}: lags": query.lags})
    for step in checked_steps(steps):
        points: Any = query.points(step)
        if not isinstance(points, tuple) or isinstance(points, Point):
            raise ArgumentTypeError(f"{name}: points({step}) must be a tuple of dpcore.queries.Point, not {points!r}")
        if not points:
            raise ArgumentError(f"{name}: has no point at step {step}; a query of nothing is (Point(0.0),)")
        for point in points:
            _check_point(name, query, point, step)


def _check_point(name: str, query: Query, point: Any, step: int) -> None:
    if not isinstance(point, Point):
        raise ArgumentTypeError(f"{name}: points({step}) must return dpcore.queries.Point, not {point!r}")
    at = f"{name}: points({step})"
    number(**{f"{at}.weight": point.weight})
    number(**{f"{at}.displacement": point.displacement})
    lag = integer(0, **{f"{at}.lag": point.lag})
    needed = lag + bool(point.displacement and 0 < lag < step)
    if lag > step or needed > query.lags:
        raise ArgumentError(
            f"{name}: {point} needs {needed} earlier parameter points, and at step {step} there are "
            f"{min(step, query.lags)}; lags={query.lags} says how many are kept"
        )
    if point.displacement and not lag and not query.uses_displacement:
        raise ArgumentError(f"{name}: {point} needs the last displacement; say uses_displacement=True")


class Outer:
    """A query around another one, whose displacement it uses."""

    query: Query

    @property
    def uses_displacement(self) -> bool:
        """That of the inner query."""
        return self.query.uses_displacement


def widest_window(query: Any) -> int | None:
    """Return the `window` of a query or of one inside it, None if none has one."""
    windows: list[int] = []
    while query is not None:
        windows += [query.window] if isinstance(getattr(query, "window", None), int) else []
        query = getattr(query, "query", None)
    return max(windows, default=None)


def combined(points: Iterable[Point]) -> tuple[Point, ...]:
    """Add the weights of equal points and drop those that cancel: one gradient for each place."""
    weights: dict[tuple[float, int], float] = {}
    for weight, displacement, lag in points:
        weights[displacement, lag] = weights.get((displacement, lag), 0.0) + weight
    result = tuple(Point(weight, *place) for place, weight in weights.items() if weight != 0)
    return result or (Point(0.0),)


def delayed(points: Iterable[Point], weight: float, lag: int) -> tuple[Point, ...]:
    """Return an earlier step's points, as seen `lag` steps later, times `weight`."""
    return tuple(Point(weight * point.weight, point.displacement, point.lag + lag) for point in points)


def lags_behind(query: Query, steps: int) -> int:
    """Return the earlier points that a query takes if it is evaluated as of `steps` steps ago.

    A displacement that ended k steps ago is the difference of the points k and k + 1 steps back.
    """
    return query.lags + steps + int(query.uses_displacement and steps > 0)


# DP-PMLF: per-example momentum over the last parameter points.


_LEAST_LOG = -750.0  # e^-750 is 0 in float64, whose least number is e^-744.4


@dataclass(frozen=True)
class ParameterWindow(Checked, Outer):
    """``v_{t,i} = sum_{j<k'} (beta^j / c) grad(x_{t-j}; i)`` with ``k' = min(k, t + 1)``, ``c = sum_{j<k'} beta^j``.

    Parameters
    ----------
    window : int
        k >= 1, the number of parameter points; k = 1 is the plain query.
    beta : float
        Decay of the weights, 0 <= beta < 1.
    normalized : bool
        Whether the weights are divided by their sum c (DP-PMLF) or not (InnerOuter).
    query : Query
        The query at each of the points; the plain gradient by default.

    Notes
    -----
    The points belong to the run: an example's gradients at earlier points are taken again, in the step it takes part
    in, and nothing is stored for it. In the first steps the window is shorter, and so is c: with the full c the first
    vectors would be shrunk.

    References
    ----------
    DP-PMLF, algorithm 1; the truncated normalizer is algorithms.md 10.13.
    """

    window: int = 2
    beta: float = 0.1
    normalized: bool = True
    query: Query = field(default_factory=Plain)

    rules: ClassVar[Rules] = {"window": partial(integer, 1), "beta": decay}

    @property
    def lags(self) -> int:
        """Earlier points kept."""
        return lags_behind(self.query, self.window - 1)

    def points(self, step: int) -> tuple[Point, ...]:
        """Return at most `window` points (times those of the inner query)."""
        # Later weights are 0 in float64, and points of weight 0 are left out: nobody counts a billion of them.
        alive = 1 if self.beta == 0 else math.ceil(_LEAST_LOG / math.log(self.beta))
        count = min(self.window, step + 1, alive)
        c = sum(self.beta**j for j in range(count)) if self.normalized else 1.0
        return combined(
            point for j in range(count) for point in delayed(self.query.points(step - j), self.beta**j / c, j)
        )


# Stochastic recursive gradients: the change between the last two parameter points.


@dataclass(frozen=True)
class RecursiveDifference(Checked, Outer):
    """``v_{t,i} = grad(x_t; i) - c_t grad(x_{t-1}; i)`` with c_0 = 0, formed before its norm is taken.

    Parameters
    ----------
    decay : float or sequence of float
        c, or c_0, c_1, ... of every step (c_0 is taken as 0), each in [0, 1]. It must be that of the accumulation that
        follows (`dpcore.filters.Accumulation`).
    query : Query
        The query at both points; the plain gradient by default.

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
            raise ArgumentError(f"decay: has {len(self.decay)} steps but the run has more; give one number for each")
        return self.decay[step]


@dataclass(frozen=True)
class AcceleratedDifference:
    """``v_{t,i} = eta_t grad(x_t; i) - eta_{t-1} grad(x_{t-1}; i)`` with ``eta_t = t + 1`` and ``eta_{-1} = 0``.

    (DP-SRG, algorithm 1, Accelerated-DP-SRGD.)
    """

    uses_displacement: ClassVar[bool] = False
    lags: ClassVar[int] = 1

    def points(self, step: int) -> tuple[Point, ...]:
        """Return two points, one at the first step."""
        here = Point(float(step + 1))
        return (here, Point(-float(step), lag=1)) if step > 0 else (here,)


# DiSK: the gradient predicted from two points along the last displacement.


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
        Or that filter itself if its weight k_t changes: anything with ``gain(step)``.
    gamma : float
        How far along the last displacement the second gradient is taken; any number but 0. At -1 it is taken at
        x_{t-1}, and the method is STORM.

    Notes
    -----
    The first step has no displacement and takes the plain gradient. If ``w`` is 1, only one gradient is needed.

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
                f"gamma={self.gamma!r}: must not be 0, which makes the two points coincide; for averaging without a "
                f"prediction {remedy}"
            )

    def weight(self, step: int) -> float:
        """Return w_step, the weight of the displaced point."""
        k = self.kappa.gain(step) if isinstance(self.kappa, Gain) else self.kappa
        return 0.0 if step == 0 or k == 1 else (1 - k) / (k * self.gamma)

    @property
    def uses_displacement(self) -> bool:
        """Whether the query ever takes a displaced point."""
        return self.kappa != 1

    def points(self, step: int) -> tuple[Point, ...]:
        """Return one or two points."""
        w = self.weight(step)
        if w == 0:
            return (Point(1.0),)
        if math.isclose(w, 1.0, rel_tol=1e-12):  # (1 - kappa) / (kappa gamma) is rounded: a weight of 1e-16 is none
            return (Point(1.0, self.gamma),)
        return Point(w, self.gamma), Point(1 - w)


# Scale-then-privatize: gradients scaled for each coordinate by released second moments, before they are clipped.


class Phase(Enum):
    """A step's use of the scale."""

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
        The scaled query q.
    scale_eps : float
        Added to the root of the second moment, > 0.
    max_scaled_norm : float or None
        Clip norm of the scaled vectors, which have other units than gradients; None takes the clip's own.
    unscaled_steps, scaled_steps : int
        Cycles of `unscaled_steps` unscaled steps, then `scaled_steps` steps scaled by the second moment at their
        beginning. (0, 1) scales every step by the newest one: scale-then-privatize.

    Notes
    -----
    nuhat is the update's bias-corrected second moment, a function of earlier releases; the scale is public, and the
    scaled vector is clipped after it is formed, so an example moves the sum by at most `max_scaled_norm`. Noise has the
    noise multiplier times the norm in force at that step. Before the first step nuhat is 0.

    References
    ----------
    Private adaptive optimizers, section 3.4, algorithm 8; with an update of second_moment="delayed" the delayed
    preconditioner that it is compared with there.
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
        """Return the phase of step `step`."""
        place = step % self.cycle - self.unscaled_steps
        return Phase.UNSCALED if place < 0 else Phase.REFRESHED if place == 0 else Phase.FROZEN

    @property
    def cycle(self) -> int:
        """Steps of a cycle."""
        return self.unscaled_steps + self.scaled_steps

    def averages(self, steps: int) -> int:
        """Return the number of cycles whose unscaled steps have all been taken within the first `steps` steps."""
        return (steps + self.scaled_steps) // self.cycle
