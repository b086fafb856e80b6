"""No filter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpcore.spec.ops import FilterCoefficients


@dataclass(frozen=True)
class Identity:
    """The update sees each released average as it is."""

    order: ClassVar[int] = 0
    adaptive: ClassVar[bool] = False

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return no recurrence at all."""
        return ()
