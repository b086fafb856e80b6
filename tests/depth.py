"""How much a test looks at: little at every change, much in the nightly job."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")


def chosen(usual: T, nightly: T) -> T:
    """Return the second value under hypothesis' profile "nightly", otherwise the first."""
    return nightly if settings.default is settings.get_profile("nightly") else usual
