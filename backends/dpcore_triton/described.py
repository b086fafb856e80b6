"""Descriptions of tensors, as far as launches depend on them: the keys of checks and tables that are kept."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter

from torch import Tensor

from dpcore_triton.launch import current_stream

_DTYPE = attrgetter("dtype")


def places(tensors: Sequence[Tensor]) -> Hashable:
    """Return all that a launch can depend on: addresses, shapes, strides where one has gaps, dtypes and devices.

    Every tensor is described at every step. So one call reads an attribute of all of them: a loop in Python takes three
    times as long. None if one is no tensor; a check will name it.
    """
    try:
        strides = None if all(map(Tensor.is_contiguous, tensors)) else tuple(map(Tensor.stride, tensors))
        found = tuple(map(Tensor.data_ptr, tensors)), tuple(map(Tensor.size, tensors)), strides
        # It is -1 on a CPU, and makes no object, as `device` does. A tensor on no device has no address either.
        devices = set(map(Tensor.get_device, tensors))
    except TypeError:
        return None
    device = devices.pop() if len(devices) == 1 else tuple(map(Tensor.get_device, tensors))
    return *found, tuple(map(_DTYPE, tensors)), device


def described(tensors: Sequence[Tensor], *others: Hashable) -> Hashable:
    """Return a key of tensors and further values, on the present stream; None if one is no tensor."""
    found = places(tensors) if tensors else None
    return None if found is None else (found, others, current_stream(tensors[0].device))


def present(vectors: Sequence[Tensor | None] | None) -> list[Tensor]:
    """Return those that are not None."""
    return [vector for vector in vectors or () if vector is not None]


def pattern(vectors: Sequence[Tensor | None] | None) -> Hashable:
    """Return their number, and which of them are not None."""
    there = None if vectors is None else tuple([vector is not None for vector in vectors])
    return there if there is None or any(there) else len(there)


def address(vector: Tensor | None) -> int:
    """Return where a vector lies, 0 for none."""
    return 0 if vector is None else vector.data_ptr()
