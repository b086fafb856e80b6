"""A strategy by name, before the number of steps is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpcore.errors import ArgumentError
from dpcore.spec.validate import choice, integer
from dpcore.stages.strategies.base import Strategy
from dpcore.stages.strategies.named import NAMES, strategy

BANDED = "banded-inverse-square-root"


@dataclass(frozen=True)
class NamedStrategy:
    """A name of `dpcore.stages.strategies.NAMES`; `dpcore.Plan` makes the matrix for its number of steps.

    Parameters
    ----------
    name : str
        One of the names.
    bands : int, optional
        Of "banded-inverse-square-root"; a shorter run takes as many as it has steps.
    """

    name: str
    bands: int | None = None

    def __post_init__(self) -> None:
        choice(NAMES, strategy=self.name)
        if self.bands is not None:
            integer(1, bands=self.bands)
        if self.bands is None and self.name == BANDED:
            raise ArgumentError(f"bands=None: strategy={BANDED!r} needs a number of bands, such as 4")
        if self.bands is not None and self.name != BANDED:
            raise ArgumentError(f"bands={self.bands!r}: is only for strategy={BANDED!r}")

    def of(self, steps: int) -> Strategy:
        """Return the strategy for a run of `steps` steps."""
        bands = None if self.bands is None else min(self.bands, max(steps, 1))
        return strategy(self.name, steps, bands=bands)

    def describe(self) -> dict[str, Any]:
        """Return name and bands."""
        return {"kind": self.name, **({} if self.bands is None else {"bands": self.bands})}
