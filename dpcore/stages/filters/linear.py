"""Filters of known coefficients: the papers' low-pass filters, textbook ones, DiSK's average, an accumulation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.spec.ops import FilterCoefficients
from dpcore.spec.recurrence import response
from dpcore.spec.validate import (
    Checked,
    Rules,
    choice,
    fraction,
    integer,
    open_unit,
    positive,
    sequence,
    unit_intervals,
)
from dpcore.stages.checked_steps import CHECKED_STEPS
from dpcore.theory.analysis.filters import Recurrence

_GAIN_TOLERANCE = 1e-9
_CANCELLATION = 1e-6
_SMALLEST = 1e-12


@dataclass(frozen=True)
class LowPass(Recurrence):
    """``m_t = -sum_r a_r m_{t-r} + sum_r b_r g_{t-r}``, divided by c_t, the same recurrence on ones.

    Parameters
    ----------
    b : sequence of float
        b_0..b_nb.
    a : sequence of float
        a_1..a_na, the leading 1 left out.

    Raises
    ------
    ArgumentError
        If the filter is unstable (a pole on or outside the unit circle), has not unit gain
        (``-sum a + sum b = 1``), or its normalizer c_t comes to 0 at some step.

    Notes
    -----
    c_t is the partial sum of the impulse response, so dividing by it makes the weights of g_0..g_t add up to 1. It
    tends to 1 for a stable filter of unit gain.

    References
    ----------
    DOPPLER (Zhang et al.), algorithm 2 and section 4.
    """

    adaptive: ClassVar[bool] = False

    def __init__(self, b: Sequence[float], a: Sequence[float] = ()) -> None:
        super().__init__(tuple(sequence(b=b)), tuple(sequence(a=a)))
        poles = np.roots([1.0, *self.a])
        if poles.size and np.abs(poles).max() >= 1:
            worst = complex(poles[np.abs(poles).argmax()])
            raise ArgumentError(
                f"a={list(self.a)}: the filter is unstable, its pole {worst:.4g} has modulus {abs(worst):.4g}; "
                "every pole must be inside the unit circle"
            )
        gain_error = sum(self.b) - sum(self.a) - 1
        if abs(gain_error) > _GAIN_TOLERANCE:
            gain = sum(self.b) / (1 + sum(self.a))
            raise ArgumentError(
                f"b={list(self.b)}, a={list(self.a)}: the gain is {gain:.6g} and must be 1; divide b by {gain:.6g}"
            )
        c = response(self.b, (1.0, *self.a), CHECKED_STEPS, to_ones=True)
        # Small is no harm (c_0 = b_0 divides b_0 g_0) until b_0 g_0 underflows; weights that cancel are at once, for
        # the division blows up the noise.
        weights = np.abs(np.diff(c, prepend=0.0)).cumsum()
        cancels = np.abs(c) <= np.maximum(_CANCELLATION * weights, _SMALLEST)
        if cancels.any():
            step = int(cancels.argmax())
            raise ArgumentError(
                f"b={list(self.b)}, a={list(self.a)}: the normalizer c_t is {c[step]:.3g} at step {step}, "
                "and the filter's output would be divided by it; it must stay away from 0"
            )

    @property
    def order(self) -> int:
        """Number of state vectors: max(na, nb), by the transposed direct form II."""
        return max(len(self.a), len(self.b) - 1)


# Low-pass filters: the papers' by name, and textbook ones from a cut-off.


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
    return _named(choice(NAMED_FILTERS, filter=name))


@cache  # settings are checked by making all of their parts, again and again
def _named(name: str) -> LowPass:
    b, a = NAMED_FILTERS[name]
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
    The gain at frequency 0 is 1: in even orders the ripple then rises above 1. Refusals as in `butterworth`.
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
            f"{given}: float64 cannot represent this design, since {cause}. Take a higher cutoff{lower}"
        ) from cause


# Recurrences of order one.


@dataclass(frozen=True)
class Averaging(Checked):
    """``g~_t = (1 - kappa) g~_{t-1} + kappa g_t`` with ``g~_{-1} := g_0``, hence ``g~_0 = g_0``.

    Parameters
    ----------
    kappa : float
        Weight of the new gradient, in (0, 1]. Starting at g_0 is the recurrence with b_0 = 1 at the first step.

    References
    ----------
    DiSK (Zhang et al.), algorithm 3.
    """

    kappa: float
    order: ClassVar[int] = 1
    adaptive: ClassVar[bool] = False
    rules: ClassVar[Rules] = {"kappa": fraction}

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return b = (kappa,), or (1,) at the first step, and a = (-(1 - kappa),)."""
        return (FilterCoefficients((1.0 if step == 0 else self.kappa,), (self.kappa - 1,)),)


@dataclass(frozen=True)
class Accumulation(Checked):
    """``G_t = c_t G_{t-1} + x_t`` with ``c_0 = 0``, hence ``G_0 = x_0``.

    Parameters
    ----------
    decay : float or sequence of float
        c_t for every t >= 1, in [0, 1]; or c_0, c_1, ..., one a step; c_0 is taken as 0. At 1 the filter is
        the prefix sum, at 0 it does nothing. Under c < 1 a constant x accumulates to x / (1 - c): the gain is not 1,
        since the input is ``grad(x_t) - c_t grad(x_{t-1})``.

    References
    ----------
    DP-SRG (Choquette-Choo, Ganesh, Thakurta), algorithm 3, line 6 (its line 7 adds the noise a second time, which x_t
    already carries), and algorithm 1, line 4, for c = 1.
    """

    decay: float | Sequence[float]
    order: ClassVar[int] = 1
    adaptive: ClassVar[bool] = False
    rules: ClassVar[Rules] = {"decay": unit_intervals}

    def at(self, step: int) -> float:
        """Return c_step."""
        if step == 0:
            return 0.0
        return self.decay if isinstance(self.decay, float) else self.decay[step]

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return b = (1,) and a = (-c_{step+1},), which acts inside the next output.

        Raises
        ------
        ArgumentError
            If the sequence of decays ends before `step`.
        """
        following = step + 1
        if not isinstance(self.decay, float):
            if step >= len(self.decay):
                raise ArgumentError(
                    f"decay=<{len(self.decay)} numbers>: must have one number a step, also for step {following}"
                )
            following = following if following < len(self.decay) else 0
        return (FilterCoefficients((1.0,), (-self.at(following),)),)
