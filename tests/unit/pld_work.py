"""How much work a privacy-loss distribution takes, counted: a test of speed that no busy machine can fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from dpcore.accounting.pld import intervals, loss


@dataclass
class Work:
    """Attributes: the length of each transform, and the points of all grids on which a step was put."""

    transforms: list[int] = field(default_factory=list)
    points: int = 0


@contextmanager
def counted() -> Iterator[Work]:
    """Count what is done inside, where nothing is remembered of what was done before."""
    work = Work()
    compose, upper, lower = intervals.compose, loss.upper, loss.lower

    def composed(*given: Any, **settings: Any) -> Any:
        curve = compose(*given, **settings)
        work.transforms.append(curve.size)
        return curve

    def put(on_grid: Any) -> Any:
        def counting(*given: Any) -> Any:
            masses = on_grid(*given)
            work.points += masses.p.size
            return masses

        return counting

    intervals._epsilon.cache_clear()
    intervals._delta.cache_clear()
    with (
        mock.patch.object(intervals, "compose", composed),
        mock.patch.object(loss, "upper", put(upper)),
        mock.patch.object(loss, "lower", put(lower)),
    ):
        yield work
