"""Work that is done again at each step, by a backend that has no shorter way to do it."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def repeat(work: Callable[..., T], *args: Any) -> T:
    """See `dpcore.spec.ops.Backend.repeat`."""
    return work(*args)
