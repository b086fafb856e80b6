"""How much a test looks at: little at every change, much in the nightly job."""

from collections.abc import Iterable
from itertools import product
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis.errors import InvalidArgument

S = TypeVar("S")
T = TypeVar("T")


def chosen(usual: T, nightly: T) -> T:
    """Return the second value under hypothesis' profile "nightly", otherwise the first."""
    try:
        return nightly if settings.default is settings.get_profile("nightly") else usual
    except InvalidArgument:  # a process that a test started has imported the module without tests/conftest.py
        return usual


nightly = pytest.mark.skipif(chosen(True, False), reason="the nightly job runs it")
"""For what takes long and repeats what another test shows."""


def pairs(one: Iterable[S], other: Iterable[T], every: int) -> list[tuple[S, T]]:
    """Return all pairs under "nightly", otherwise one of `every` pairs: each value of both sides with some others."""
    numbered = product(enumerate(one), enumerate(other))
    return [(a, b) for (i, a), (j, b) in numbered if (i - j) % chosen(every, 1) == 0]
