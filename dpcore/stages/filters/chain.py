"""Filters in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.ops import FilterCoefficients
from dpcore.stages.filters.base import Filter


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
                raise ArgumentTypeError(f"filters={stage!r}: must be filters from dpcore.stages.filters")
            if stage.adaptive:
                raise ArgumentError(
                    f"filters={stage!r}: an adaptive filter weighs the released averages themselves, kept for it, and "
                    "cannot stand in a chain, where it would meet another filter's output; use it alone"
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
