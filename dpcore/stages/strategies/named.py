"""Strategies by name."""

from __future__ import annotations

from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.stages.strategies.base import Strategy, check_steps
from dpcore.stages.strategies.dense import from_matrix
from dpcore.stages.strategies.identity import Identity
from dpcore.stages.strategies.toeplitz import SquareRoot, banded_inverse_square_root
from dpcore.stages.strategies.tree import Tree, TreeOptimal

NAMES: Final = ("identity", "tree", "tree-optimal", "square-root", "banded-inverse-square-root")


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
    banded = isinstance(name_or_object, str) and name_or_object == "banded-inverse-square-root"
    if bands is not None and not banded:
        raise ArgumentError(f"bands={bands!r}: only 'banded-inverse-square-root' takes bands")
    chosen = _named(name_or_object, steps, bands) if isinstance(name_or_object, str) else _given(name_or_object)
    check_steps(chosen, steps)
    return chosen


def _named(name: str, steps: int, bands: int | None) -> Strategy:
    name = validate.choice(NAMES, strategy=name)
    if name == "banded-inverse-square-root":
        if bands is None:
            raise ArgumentError("bands=None: 'banded-inverse-square-root' needs a number of bands, such as bands=4")
        return banded_inverse_square_root(bands, steps)
    if name == "identity":
        return Identity()
    kinds: dict[str, Any] = {"tree": Tree, "tree-optimal": TreeOptimal, "square-root": SquareRoot}
    return cast("Strategy", kinds[name](steps))


def _given(value: Any) -> Strategy:
    parts = ("order", "steps", "coefficients", "rows", "matrix", "columns", "inverse_row_norms", "describe")
    if all(hasattr(value, part) for part in parts):
        return cast("Strategy", value)
    if isinstance(value, (np.ndarray, list, tuple)):
        return from_matrix(value)
    raise ArgumentTypeError(
        f"strategy={value!r}: must be a name, one of {', '.join(map(repr, NAMES))}, a (T, T) array or a strategy"
    )
