"""Low-pass filters: the papers' by name, and textbook ones from a cut-off."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.spec.validate import choice, integer, open_unit, positive
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


def butterworth(order: int, cutoff: float) -> LowPass:
    """Return the Butterworth filter, scaled to unit gain: the flattest response below the cut-off.

    Parameters
    ----------
    order : int
        1, 2 or 3.
    cutoff : float
        Frequency at which the power is halved, as a fraction of the highest (half a cycle a step), in (0, 1).

    Raises
    ------
    ArgumentError
        If the order is another, or the cut-off so low that the first coefficient, and with it the normalizer, vanishes.
    """
    from scipy.signal import butter

    order, cutoff = _order(order), open_unit(cutoff=cutoff)
    return _unit_gain(butter(order, cutoff), f"order={order}, cutoff={cutoff!r}")


def chebyshev(order: int, cutoff: float, ripple: float) -> LowPass:
    """Return the Chebyshev filter of type I: a steeper edge, paid for by a ripple below the cut-off.

    Parameters
    ----------
    order : int
        1, 2 or 3.
    cutoff : float
        Frequency at which the response leaves the ripple's band, as a fraction of the highest, in (0, 1).
    ripple : float
        Height of the ripple in decibels, greater than 0.

    Notes
    -----
    Of unit gain at frequency 0: in even orders the ripple then rises above 1. Refuses what `butterworth` does.
    """
    from scipy.signal import cheby1

    order, cutoff, ripple = _order(order), open_unit(cutoff=cutoff), positive(ripple=ripple)
    return _unit_gain(cheby1(order, ripple, cutoff), f"order={order}, cutoff={cutoff!r}, ripple={ripple!r}")


def _order(order: int) -> int:
    if integer(1, order=order) > 3:
        raise ArgumentError(f"order={order!r}: must be 1, 2 or 3; steeper filters are chains of these (filters.Chain)")
    return order


def _unit_gain(design: Any, given: str) -> LowPass:
    b, a = (np.asarray(coefficients, dtype=np.float64) for coefficients in design)
    b = b * (a.sum() / b.sum()) if b.sum() > 0 else b
    lower = " or a lower order, such as filters of order 1 in a Chain" if a.size > 2 else ""
    try:
        return LowPass(b=b.tolist(), a=a[1:].tolist())
    except ArgumentError as cause:
        raise ArgumentError(
            f"{given}: float64 does not hold this design, for {cause}. Take a higher cutoff{lower}"
        ) from cause
