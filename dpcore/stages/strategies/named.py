"""Strategies by name, also before the number of steps is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.stages.strategies.banded import Identity
from dpcore.stages.strategies.base import Strategy, check_rows, check_steps
from dpcore.stages.strategies.dense import Tree, TreeOptimal, from_matrix
from dpcore.stages.strategies.toeplitz import SquareRoot, banded_inverse_square_root

BANDED: Final = "banded-inverse-square-root"
NAMES: Final = ("identity", "tree", "tree-optimal", "square-root", BANDED)


@dataclass(frozen=True)
class NamedStrategy:
    """A name of `dpcore.strategies.NAMES`; `dpcore.Plan` makes the matrix for its number of steps.

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
        validate.choice(NAMES, strategy=self.name)
        if self.name != BANDED and self.bands is not None:
            raise ArgumentError(f"bands={self.bands!r}: is only for strategy={BANDED!r}")
        if self.name == BANDED and self.bands is None:
            raise ArgumentError(f"bands=None: strategy={BANDED!r} needs a number of bands, such as bands=4")
        if self.bands is not None:
            object.__setattr__(self, "bands", validate.integer(1, bands=self.bands))

    def of(self, steps: int) -> Strategy:
        """Return the strategy for a run of `steps` steps."""
        return strategy(self.name, steps, bands=None if self.bands is None else min(self.bands, max(steps, 1)))

    def describe(self) -> dict[str, Any]:
        """Return name and bands."""
        return {"kind": self.name, **({} if self.bands is None else {"bands": self.bands})}


def strategy(name_or_object: str | npt.ArrayLike | Strategy, steps: int, *, bands: int | None = None) -> Strategy:
    """Return a strategy for a run of `steps` steps.

    Parameters
    ----------
    name_or_object : str, (T, T) array or Strategy
        One of `NAMES`; a lower-triangular matrix with T >= steps, of which every row is kept; or a strategy, returned
        as it is.
    steps : int
        Steps of the run, 1 or more.
    bands : int, optional
        Bands of "banded-inverse-square-root", and of nothing else.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the name is unknown, `bands` is missing or out of place, or the strategy does not suit (`check_steps`).
    """
    steps = validate.integer(steps=steps, minimum=1)
    if isinstance(name_or_object, str):
        named = NamedStrategy(name_or_object, bands)
        check_rows(named.name, steps, dense=named.name == TreeOptimal.kind)
        kinds: dict[str, Any] = {"tree": Tree, "tree-optimal": TreeOptimal, "square-root": SquareRoot}
        if named.bands is not None:
            chosen: Any = banded_inverse_square_root(named.bands, steps)
        else:
            chosen = Identity() if named.name == "identity" else kinds[named.name](steps)
    elif bands is not None:
        raise ArgumentError(f"bands={bands!r}: is only for strategy={BANDED!r}")
    else:
        chosen = _given(name_or_object)
    check_steps(chosen, steps)
    return cast("Strategy", chosen)


def _given(value: Any) -> Any:
    parts = ("of", "order", "steps", "coefficients", "rows", "matrix", "columns", "inverse_row_norms", "describe")
    if all(hasattr(value, part) for part in parts):
        return value
    if isinstance(value, (np.ndarray, list, tuple)):
        return from_matrix(value)
    raise ArgumentTypeError(
        f"strategy={value!r}: must be a name, one of {', '.join(map(repr, NAMES))}, a (T, T) array or a strategy"
    )
