"""Tensors as launches depend on them: the key under which what was made of them, and checked, is kept."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter

from torch import Tensor

_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")


def places(tensors: Sequence[Tensor]) -> Hashable:
    """Return all that a launch can depend on: addresses, shapes, strides where one has gaps, dtypes and devices.

    It is asked of every tensor at every step. So each attribute of all of them is read by one call: a loop in Python
    takes three times as long. None where one is no tensor, which a check will name.
    """
    try:
        strides = None if all(map(Tensor.is_contiguous, tensors)) else tuple(map(Tensor.stride, tensors))
        found = tuple(map(Tensor.data_ptr, tensors)), tuple(map(Tensor.size, tensors)), strides
    except TypeError:
        return None
    return *found, _shared(map(_DTYPE, tensors)), _shared(map(_DEVICE, tensors))


def _shared(values: Iterable[Hashable]) -> Hashable:
    """Return the one value that all have, or all values."""
    every = tuple(values)
    different = set(every)
    return different.pop() if len(different) == 1 else every


def present(vectors: Sequence[Tensor | None] | None) -> list[Tensor]:
    """Return those that are there."""
    return [vector for vector in vectors or () if vector is not None]


def pattern(vectors: Sequence[Tensor | None] | None) -> Hashable:
    """Return which of them are there."""
    there = tuple([vector is not None for vector in vectors or ()])
    return there if any(there) else False


def address(vector: Tensor | None) -> int:
    """Return where a vector lies, 0 for none."""
    return 0 if vector is None else vector.data_ptr()
