"""The protocol of a query: a public linear combination of one example's gradients at public points."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.validate import integer, number
from dpcore.stages.checked_steps import checked_steps


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
    """Refuse a query whose points cannot be taken: one of the caller's own may promise one thing and do another.

    All steps up to `dpcore.stages.checked_steps.CHECKED_STEPS` are asked for, and the last.
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
        raise ArgumentTypeError(f"{name}: points({step}) must hold dpcore.queries.Point, not {point!r}")
    at = f"{name}: points({step})"
    number(**{f"{at}.weight": point.weight})
    number(**{f"{at}.displacement": point.displacement})
    lag = integer(**{f"{at}.lag": point.lag})
    needed = lag + bool(point.displacement and 0 < lag < step)
    if not 0 <= lag <= step or needed > query.lags:
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
    """Return the `window` of a query or of one inside of it, None where none has one."""
    found: list[int] = []
    while query is not None:
        found += [query.window] if isinstance(getattr(query, "window", None), int) else []
        query = getattr(query, "query", None)
    return max(found, default=None)


def combined(points: Iterable[Point]) -> tuple[Point, ...]:
    """Add the weights of equal points and drop those that cancel: one gradient for each place."""
    weights: dict[tuple[float, int], float] = {}
    for weight, displacement, lag in points:
        weights[displacement, lag] = weights.get((displacement, lag), 0.0) + weight
    found = tuple(Point(weight, *place) for place, weight in weights.items() if weight != 0)
    return found or (Point(0.0),)


def delayed(points: Iterable[Point], weight: float, lag: int) -> tuple[Point, ...]:
    """Return an earlier step's points, as seen `lag` steps later, times `weight`."""
    return tuple(Point(weight * point.weight, point.displacement, point.lag + lag) for point in points)


def lags_behind(query: Query, steps: int) -> int:
    """Return the earlier points that a query takes where it is asked as it was `steps` steps ago.

    A displacement that ended k steps ago is the difference of the points k and k + 1 steps back.
    """
    return query.lags + steps + int(query.uses_displacement and steps > 0)
