"""Textbook low-pass filters from a cut-off."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.spec.validate import integer, open_unit, positive
from dpcore.stages.filters.low_pass import LowPass

_HIGHEST_ORDER = 3


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
    if integer(1, order=order) > _HIGHEST_ORDER:
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
