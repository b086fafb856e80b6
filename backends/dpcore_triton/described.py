"""Tensors as launches depend on them: the key under which what was made of them, and checked, is kept."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter

from torch import Tensor

from dpcore_triton.launch import current_stream

_DTYPE = attrgetter("dtype")


def places(tensors: Sequence[Tensor]) -> Hashable:
    """Return all that a launch can depend on: addresses, shapes, strides where one has gaps, dtypes and devices.

    It is asked of every tensor at every step. So each attribute of all of them is read by one call: a loop in Python
    takes three times as long. None where one is no tensor, which a check will name.
    """
    try:
        strides = None if all(map(Tensor.is_contiguous, tensors)) else tuple(map(Tensor.stride, tensors))
        found = tuple(map(Tensor.data_ptr, tensors)), tuple(map(Tensor.size, tensors)), strides
        # Of a CPU it is -1, and it makes no object, as `device` does. What is on no device has no address either.
        devices = set(map(Tensor.get_device, tensors))
    except TypeError:
        return None
    device = devices.pop() if len(devices) == 1 else tuple(map(Tensor.get_device, tensors))
    return *found, tuple(map(_DTYPE, tensors)), device


def described(tensors: Sequence[Tensor], *others: Hashable) -> Hashable:
    """Return a key of tensors and of what else is given, on the present stream; None where one is no tensor."""
    found = places(tensors) if tensors else None
    return None if found is None else (found, others, current_stream(tensors[0].device))


def present(vectors: Sequence[Tensor | None] | None) -> list[Tensor]:
    """Return those that are there."""
    return [vector for vector in vectors or () if vector is not None]


def pattern(vectors: Sequence[Tensor | None] | None) -> Hashable:
    """Return how many they are, and which of them are there."""
    there = None if vectors is None else tuple([vector is not None for vector in vectors])
    return there if there is None or any(there) else len(there)


def address(vector: Tensor | None) -> int:
    """Return where a vector lies, 0 for none."""
    return 0 if vector is None else vector.data_ptr()
