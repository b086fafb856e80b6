"""Arrays of this backend: NumPy's own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray


def from_numpy(values: NDArray[Any]) -> NDArray[Any]:
    """See `dpcore.spec.ops.Backend.from_numpy`."""
    return np.array(values, order="C", copy=True)


def to_numpy(array: NDArray[Any]) -> NDArray[Any]:
    """See `dpcore.spec.ops.Backend.to_numpy`."""
    return np.array(array, order="C", copy=True)


def beside(array: NDArray[Any]) -> AbstractContextManager[None]:
    """See `dpcore.spec.ops.Backend.beside`. All arrays are in one memory."""
    del array
    return nullcontext()


def zeros_like(array: NDArray[Any], dtype: str | None = None) -> NDArray[Any]:
    """See `dpcore.spec.ops.Backend.zeros_like`."""
    return np.zeros(array.shape, dtype=array.dtype if dtype is None else dtype)


def at_least_float32(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of 16 bits in float32, in which it is computed with; any other as it is."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def clear(arrays: Sequence[NDArray[Any]]) -> None:
    """See `dpcore.spec.ops.Backend.clear`."""
    for array in arrays:
        array[...] = 0
