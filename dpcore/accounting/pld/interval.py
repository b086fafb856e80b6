"""A closed interval that certainly holds a number."""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """Certified bounds: lower <= the number <= upper; both may be infinity. ``lower, upper = interval``."""

    lower: float
    upper: float

    @property
    def gap(self) -> float:
        """Upper minus lower, 0 where both are the same infinity."""
        return 0.0 if self.lower == self.upper else self.upper - self.lower
