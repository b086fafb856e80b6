"""DOPPLER's low-pass filter with its initialization bias removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.spec.ops import FilterCoefficients
from dpcore.spec.recurrence import response
from dpcore.spec.validate import number, sequence

_GAIN_TOLERANCE = 1e-9
_CANCELLATION = 1e-6
_SMALLEST = 1e-12
_CHECKED_STEPS = 4096


@dataclass(frozen=True)
class LowPass:
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

    b: tuple[float, ...]
    a: tuple[float, ...] = ()
    adaptive: ClassVar[bool] = False

    def __init__(self, b: Sequence[float], a: Sequence[float] = ()) -> None:
        object.__setattr__(self, "b", tuple(number(b=value) for value in sequence(b=b)))
        object.__setattr__(self, "a", tuple(number(a=value) for value in sequence(a=a)))
        self._check()

    def _check(self) -> None:
        if not self.b:
            raise ArgumentError("b=[]: must hold at least the coefficient b_0")
        poles = np.roots([1.0, *self.a])
        if poles.size and np.abs(poles).max() >= 1:
            worst = complex(poles[np.abs(poles).argmax()])
            raise ArgumentError(
                f"a={list(self.a)}: the filter is unstable, its pole {worst:.4g} has modulus {abs(worst):.4g}; "
                "every pole must lie inside the unit circle"
            )
        gain_error = sum(self.b) - sum(self.a) - 1
        if abs(gain_error) > _GAIN_TOLERANCE:
            gain = sum(self.b) / (1 + sum(self.a))
            raise ArgumentError(
                f"b={list(self.b)}, a={list(self.a)}: the gain is {gain:.6g} and must be 1; divide b by {gain:.6g}"
            )
        c = response(self.b, (1.0, *self.a), _CHECKED_STEPS, to_ones=True)
        # Small is no harm (c_0 = b_0 divides b_0 g_0) until b_0 g_0 underflows; weights that cancel are at once, for
        # the division blows up the noise.
        weights = np.abs(np.diff(c, prepend=0.0)).cumsum()
        cancels = np.abs(c) <= np.maximum(_CANCELLATION * weights, _SMALLEST)
        if cancels.any():
            step = int(cancels.argmax())
            raise ArgumentError(
                f"b={list(self.b)}, a={list(self.a)}: the normalizer c_t is {c[step]:.3g} at step {step}, "
                "where the filter's output would be divided by it; it must stay away from 0"
            )

    @property
    def order(self) -> int:
        """Number of state vectors: max(na, nb), by the transposed direct form II."""
        return max(len(self.a), len(self.b) - 1)

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return b, a and c_step."""
        size = max(64, 1 << step.bit_length())
        normalizers = response(self.b, (1.0, *self.a), size, to_ones=True)
        return (FilterCoefficients(self.b, self.a, float(normalizers[step])),)
