"""DiSK's scalar Kalman filter: the average whose weight follows from the variances."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from dpcore.spec.ops import FilterCoefficients
from dpcore.spec.validate import integer, non_negative, plain
from dpcore.theory.kalman import Variances, kappa_from_variances, variances


@dataclass(frozen=True)
class ScalarKalman:
    """``g~_t = (1 - k_t) g~_{t-1} + k_t g_t`` with ``g~_0 = g_0`` and the Kalman gain k_t.

    The gain follows ``k_t = (p + sH + sv) / (p + sw + sv)``, ``p <- (1 - k_t) (p + sH + sv)`` with sX for sigma_X^2,
    and settles at `kappa`, where this is `Averaging(kappa)`.

    Parameters
    ----------
    sigma_H : float
        Standard deviation, per coordinate, of the error of the Hessian's displacement product; at most sigma_w.
    sigma_v : float
        That of the gradient's own motion between two steps, which the product does not predict.
    sigma_w : float
        That of the noise in a released average (of sampling and of privacy).
    initial_variance : float, optional
        p before the first step; the paper's sigma_w^2 by default.

    Notes
    -----
    The predicted part, ``H d``, enters through the query: give this filter to `dpcore.queries.TwoPoint` as its kappa.
    k_0 moves p on but weighs nothing, since ``g~_{-1} := g_0``.

    References
    ----------
    DiSK (Zhang et al.), section 3.2 and appendix A.
    """

    sigma_H: float
    sigma_v: float
    sigma_w: float
    initial_variance: float | None = None
    order: ClassVar[int] = 1
    adaptive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        plain(self)
        variances(self.sigma_H, self.sigma_v, self.sigma_w)
        if self.initial_variance is not None:
            non_negative(initial_variance=self.initial_variance)

    @property
    def kappa(self) -> float:
        """The gain that k_t settles at."""
        return kappa_from_variances(self.sigma_H, self.sigma_v, self.sigma_w)

    def gain(self, step: int) -> float:
        """Return k_step, in (0, 1]."""
        size = max(64, 1 << integer(0, step=step).bit_length())
        s = variances(self.sigma_H, self.sigma_v, self.sigma_w)
        p = s.w if self.initial_variance is None else self.initial_variance / s.unit / s.unit
        return _gains(s, p, size)[step]

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return b = (k_step,), or (1,) at the first step, and a = (-(1 - k_{step+1}),), which acts in the next one."""
        return (FilterCoefficients((1.0 if step == 0 else self.gain(step),), (self.gain(step + 1) - 1,)),)


@lru_cache(maxsize=64)
def _gains(s: Variances, p: float, size: int) -> tuple[float, ...]:
    """Return k_0..k_{size-1}."""
    gains = []
    for _ in range(size):
        predicted = p + s.H + s.v
        k = predicted / (p + s.w + s.v)
        p = (s.w - s.H) / (p + s.w + s.v) * predicted
        gains.append(k)
    return tuple(gains)
