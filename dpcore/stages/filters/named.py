"""The papers' filters by name."""

from __future__ import annotations

from typing import Final

from dpcore.spec.validate import choice
from dpcore.stages.filters.low_pass import LowPass

# name -> (b, a): DOPPLER's tables (Zhang et al., section 5 and appendix), then DP-PMLF's (table 4).
NAMED_FILTERS: Final[dict[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "none": ((1.0,), ()), "momentum": ((0.1,), (-0.9,)), "first-order v1": ((1 / 11, 1 / 11), (-9 / 11,)),
    "first-order v2": ((3 / 11, -1 / 11), (-9 / 11,)), "second-order": ((1 / 58, 2 / 58, 1 / 58), (-92 / 58, 38 / 58)),
    "f1": ((0.075, 0.025), (-0.9,)), "f2": ((0.025, 0.075), (-0.9,)), "f3": ((0.1, 0.1), (-0.8,)),
    "f4": ((0.2, 0.2), (-0.6,)), "f5": ((0.025, 0.05, 0.025), (-0.9,)), "f6": ((0.025, 0.025), (-1.8, 0.85)),
    "pmlf-mnist": ((0.1,), (-0.9,)), "pmlf-cifar": ((0.15, -0.05), (-0.9,)), "p1": ((0.4,), (-0.6,)),
    "p2": ((0.2, 0.2), (-0.6,)), "p3": ((0.5, -0.1), (-0.6,)), "p4": ((0.1,), (-0.9,)), "p5": ((0.05, 0.05), (-0.9,)),
    "p6": ((0.15, -0.05), (-0.9,)), "p7": ((0.05, 0.05), (-0.7, -0.2)),
}  # fmt: skip


def named_filter(name: str) -> LowPass:
    """Return the low-pass filter `name`.

    Raises
    ------
    ArgumentError
        If there is none of that name; the message says the nearest one.
    """
    b, a = NAMED_FILTERS[choice(NAMED_FILTERS, filter=name)]
    return LowPass(b=b, a=a)
