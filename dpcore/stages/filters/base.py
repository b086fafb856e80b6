"""The protocol of a filter: the coefficients of each step of a linear recurrence; none, and several in a row."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.ops import FilterCoefficients
from dpcore.spec.validate import integer, number
from dpcore.stages.checked_steps import checked_steps

_ROUNDING = 1e-6  # of a double pole on the circle, in `numpy.roots`
_ADAPTIVE = ("memory", "initial", "observe", "weights")


class Filter(Protocol):
    """A causal linear filter, public in all its coefficients, which may change from step to step.

    One recurrence, or several in a row. An adaptive filter (`dpcore.filters.OptimalFIR`) has none: it weighs the
    released averages themselves by numbers that are computed from them.
    """

    adaptive: ClassVar[bool]

    @property
    def order(self) -> int:
        """Number of state vectors, each of the parameters' size."""

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return the coefficients of step `step` (from 0): of each recurrence, in the order they are applied.

        Their lengths do not change from step to step. In transposed direct form II, ``a[k-1]`` and ``b[k]`` of step t
        weigh the output and the input of step t inside the output of step t + k.
        """


@dataclass(frozen=True)
class Identity:
    """The update sees each released average as it is."""

    order: ClassVar[int] = 0
    adaptive: ClassVar[bool] = False

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return no recurrence at all."""
        return ()


def check_filter(filter: Filter, steps: int) -> None:  # noqa: A002
    """Refuse a filter that is none at some step of the run: one of the caller's own may be wrong in any way.

    All steps up to `CHECKED_STEPS` are checked, and the last. If coefficients change from step to step, the poles of
    each step are checked as if its coefficients were constant.
    """
    name = f"filter={type(filter).__name__}(...)"
    order = integer(0, **{f"{name}: order": filter.order})
    if filter.adaptive:
        missing = [member for member in _ADAPTIVE if not hasattr(filter, member)]
        if missing:
            raise ArgumentTypeError(f"{name}: must have {', '.join(missing)}, since it says adaptive=True")
        return
    lengths: list[tuple[int, int]] | None = None
    known: set[tuple[float, ...]] = set()
    for step in checked_steps(steps):
        at, stages = f"{name}: coefficients({step})", _coefficients(name, filter, step)
        own = [(len(b), len(a)) for b, a, _ in stages]
        needed = sum(max(count_a, count_b - 1) for count_b, count_a in own)
        if needed != order:
            raise ArgumentError(
                f"{name}: order={order}: must be {needed}, the state vectors of its coefficients({step})"
            )
        if own != (lengths or own):
            raise ArgumentError(f"{at}: has other numbers of b and a than at step 0; must have the same at every step")
        lengths = own
        for a in {a for _, a, _ in stages} - known:
            largest = abs(a[0]) if len(a) == 1 else np.abs(np.roots([1.0, *a])).max(initial=0.0)
            if largest > 1 + _ROUNDING:
                raise ArgumentError(
                    f"{name}: is unstable at step {step}, a pole has modulus {largest:.4g}; no pole may be outside "
                    "the unit circle"
                )
            known.add(a)


def _coefficients(name: str, filter: Filter, step: int) -> tuple[FilterCoefficients, ...]:  # noqa: A002
    """Return one step's coefficients, each a finite number in its place."""
    stages: Any = filter.coefficients(step)
    if not isinstance(stages, tuple) or not all(isinstance(one, FilterCoefficients) for one in stages):
        raise ArgumentTypeError(f"{name}: coefficients({step}) must be a tuple of FilterCoefficients with a b_0 each")
    for b, a, normalizer in stages:
        if not isinstance(b, tuple) or not isinstance(a, tuple) or not b:
            raise ArgumentTypeError(
                f"{name}: coefficients({step}) has b={b!r}, a={a!r}; both must be tuples of numbers, b with its b_0"
            )
        for part, value in (*(("b", each) for each in b), *(("a", each) for each in a), ("normalizer", normalizer)):
            number(**{f"{name}: coefficients({step}).{part}": value})
        if normalizer == 0:
            raise ArgumentError(f"{name}: coefficients({step}).normalizer=0: must not be 0")
    return stages


@dataclass(frozen=True)
class Chain:
    """The output of each filter is the input of the next.

    ``Chain(f)`` filters as f does, ``Chain()`` not at all, and a chain inside a chain is laid out flat.

    Parameters
    ----------
    filters : Filter
        Any number of them, in the order in which they are applied.

    Raises
    ------
    ArgumentError
        If one of them is adaptive.
    ArgumentTypeError
        If one of them is no filter.
    """

    filters: tuple[Filter, ...]
    adaptive: ClassVar[bool] = False

    def __init__(self, *filters: Filter) -> None:
        flat: list[Filter] = []
        for stage in filters:
            if isinstance(stage, type) or not hasattr(stage, "coefficients") or not hasattr(stage, "order"):
                raise ArgumentTypeError(f"filters={stage!r}: must be filters from dpcore.filters")
            if stage.adaptive:
                raise ArgumentError(
                    f"filters={stage!r}: an adaptive filter weighs the released averages themselves, kept for it, and "
                    "cannot be in a chain, where it would get another filter's output; use it alone"
                )
            flat.extend(stage.filters if isinstance(stage, Chain) else (stage,))
        object.__setattr__(self, "filters", tuple(flat))

    @property
    def order(self) -> int:
        """Number of state vectors, those of all filters together."""
        return sum(stage.order for stage in self.filters)

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return the recurrences of all filters, the first to be applied first."""
        return tuple(recurrence for stage in self.filters for recurrence in stage.coefficients(step))
