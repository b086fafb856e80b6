"""Checks of arrays' memory: all of one call on one device, and arrays that are changed in place share none.

Both NumPy arrays and torch tensors come here. Kernels write by address, and the plain operations write one array after
the other: if two share memory the result would depend on the backend, and a refusal on the way would leave it half
written.
"""

from collections.abc import Sequence
from ctypes import addressof, c_char
from operator import itemgetter
from typing import Any

from dpcore.errors import ArgumentError, ArgumentTypeError

Name = str | tuple[str, int]
Named = tuple[Name, Any]


def listed(name: str, arrays: Sequence[Any]) -> list[Named]:
    """Return the members of a sequence by their names, which become words if one is refused."""
    return [((name, index), array) for index, array in enumerate(arrays)]


def _words(name: Name) -> str:
    return name if isinstance(name, str) else f"{name[0]}[{name[1]}]"


def check_in_place(name: Name, array: Any) -> None:
    """Refuse an array with gaps, which no operation can change in place."""
    if not (array.flags.c_contiguous if hasattr(array, "flags") else array.is_contiguous()):
        raise ArgumentTypeError(
            f"{_words(name)} is not contiguous: it is changed in place and must be, call .contiguous() first"
        )


def check_place(changed: Sequence[Named], read: Sequence[Named] = ()) -> None:
    """Refuse arrays on several devices, and those changed in place that cannot be or that share memory with another.

    Arrays that are only read may share memory with each other. The memory of an array with gaps is taken to reach
    from its first element to its last.
    """
    check_device([*changed, *read])
    spans = [(*_span(name, array, True), True, name) for name, array in changed]
    spans += [(*_span(name, array, False), False, name) for name, array in read]
    spans.sort(key=itemgetter(0))
    any_end, changed_end = -1, -1
    any_name: Name = ""
    changed_name: Name = ""
    for start, stop, is_changed, name in spans:
        if start == stop:
            continue
        end, other = (any_end, any_name) if is_changed else (changed_end, changed_name)
        if start < end:
            first, second = (name, other) if is_changed else (other, name)
            raise ArgumentError(
                f"{_words(first)} shares memory with {_words(second)}: it is changed in place and must have memory of "
                "its own"
            )
        if stop > any_end:
            any_end, any_name = stop, name
        if is_changed and stop > changed_end:
            changed_end, changed_name = stop, name


def check_device(named: Sequence[Named]) -> None:
    """Refuse arrays of different libraries or devices, and arrays without numbers."""
    if not named:
        return
    first_name, first = _words(named[0][0]), named[0][1]
    tensors, expected = hasattr(first, "data_ptr"), getattr(first, "device", "cpu")
    for name, array in named:
        if hasattr(array, "data_ptr") != tensors:
            raise ArgumentTypeError(
                f"{_words(name)} of type {type(array).__name__}: must be of {first_name}'s type, {type(first).__name__}"
            )
        if getattr(array, "device", "cpu") != expected:
            if str(expected) != "meta":
                raise ArgumentError(f"{_words(name)}.device={array.device}: must be {expected}, as the other arrays")
            break
    if str(expected) == "meta":
        raise ArgumentError(f"{first_name}.device=meta: must be the backend's device; meta tensors have no numbers")


def _span(name: Name, array: Any, changed: bool) -> tuple[int, int]:
    """Return the first address of an array and the one after its last; the same twice if it is empty."""
    if hasattr(array, "data_ptr"):
        start = array.data_ptr()
        if array.is_contiguous():
            return start, start + array.nbytes
        item, steps = array.element_size(), [stride * array.element_size() for stride in array.stride()]
    else:
        flags = array.flags
        if flags.writeable and flags.c_contiguous and array.nbytes:
            # Five times as fast as __array_interface__, and every array needs it at every step.
            start = addressof(c_char.from_buffer(array))
            return start, start + array.nbytes
        if changed and not flags.writeable and array.nbytes:
            raise ArgumentTypeError(
                f"{_words(name)} is read-only: it is changed in place, give an array that may be written"
            )
        start = array.__array_interface__["data"][0]
        if flags.c_contiguous:
            return start, start + array.nbytes
        item, steps = array.itemsize, list(array.strides)  # in bytes; they may be negative
    reach = [(size - 1) * step for size, step in zip(array.shape, steps, strict=True)]
    if changed and any(step == 0 and size > 1 for size, step in zip(array.shape, steps, strict=True)):
        raise ArgumentError(
            f"{_words(name)} is expanded: it is changed in place, and several of its elements are one number"
        )
    return start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0) + item
