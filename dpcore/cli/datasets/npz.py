"""NumPy archives with the keys x_train, y_train, x_test, y_test."""

from __future__ import annotations

import os
from typing import Any

import numpy.typing as npt

from dpcore.cli.datasets.archive import read_arrays

KEYS = ("x_train", "y_train", "x_test", "y_test")


def read(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    """Read the four arrays, and `classes` (an integer scalar) where the archive has it; DataError as `read_arrays`."""
    return read_arrays(path, KEYS, optional=("classes",))
