"""The steady state of DiSK's scalar Kalman filter.

Its error variance obeys ``p <- (1 - k) (p + sH + sv)`` under the gain ``k = (p + sH + sv) / (p + sw + sv)``, where sX
is short for sigma_X^2: of the Hessian's displacement product, of the gradient's own motion, and of the noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dpcore.errors import ArgumentError
from dpcore.spec.validate import non_negative


class Variances(NamedTuple):
    """Variances over `unit`, so that no square overflows; gains do not depend on the unit."""

    H: float
    v: float
    w: float
    unit: float


def variances(sigma_H: float, sigma_v: float, sigma_w: float) -> Variances:
    """Return sigma_H, sigma_v and sigma_w squared, where the filter has a gain in (0, 1]; refuse others."""
    sigmas = (non_negative(sigma_H=sigma_H), non_negative(sigma_v=sigma_v), non_negative(sigma_w=sigma_w))
    scale = max(sigmas)
    H, v, w = ((sigma / scale) ** 2 if scale else 0.0 for sigma in sigmas)
    given = f"sigma_H={sigma_H!r}, sigma_v={sigma_v!r}, sigma_w={sigma_w!r}"
    if H + v == 0:
        raise ArgumentError(
            f"{given}: sigma_H and sigma_v must not both be 0 (nor nothing beside sigma_w): the gain would tend to 0 "
            "and the filter would no longer look at new gradients"
        )
    if 4 * w - 3 * H + v < 0:
        raise ArgumentError(
            f"{given}: the steady state's square root of 4 sigma_w^2 - 3 sigma_H^2 + sigma_v^2 is not real; "
            "take sigma_H <= sigma_w"
        )
    if w < H:
        raise ArgumentError(
            f"{given}: the gain would exceed 1 and the error variance become negative; take sigma_H <= sigma_w"
        )
    return Variances(H, v, w, scale)


def steady_variance(sigma_H: float, sigma_v: float, sigma_w: float) -> float:
    """Return p_inf, the error variance that the filter settles at: ``(R - (sH + sv)) / 2``.

    Here ``R = sqrt((sH + sv) (4 sw - 3 sH + sv))``; the difference is not formed. `sigma_H`, `sigma_v` and `sigma_w`
    are standard deviations, per coordinate, of the Hessian's displacement product, of the gradient's own motion, and of
    the noise in the released average. Raises `ArgumentError` if the gain would leave (0, 1], or the root is not real;
    so do the functions below.

    References
    ----------
    DiSK (Zhang et al.), section 3.2; also of the functions below.
    """
    s = variances(sigma_H, sigma_v, sigma_w)
    return _steady(s) * s.unit**2


def _steady(s: Variances) -> float:
    q = s.H + s.v
    return 2 * q * (s.w - s.H) / (_root(s) + q)


def kappa_from_variances(sigma_H: float, sigma_v: float, sigma_w: float) -> float:
    """Return kappa, the gain that the filter settles at, in (0, 1].

    It depends on the ratios of sigma_H, sigma_v and sigma_w (see `steady_variance`) only.
    """
    s = variances(sigma_H, sigma_v, sigma_w)
    p = _steady(s)
    return (p + s.H + s.v) / (p + s.w + s.v)


def kalman_rate(sigma_H: float, sigma_v: float, sigma_w: float) -> float:
    """Return c_k, the factor by which the distance of p (and of the gain) to its steady state shrinks each step.

    For sigma_H, sigma_v, sigma_w as in `steady_variance`: ``(2 sw - sH + sv - R) / (2 sw - sH + sv + R)``, which equals
    ``(1 - kappa)^2`` and is computed as a square. The paper prints ``2 sw + 3 sH + sv``; the recursion is a fractional
    linear map of p, and its derivative at p_inf is the number returned here.
    """
    s = variances(sigma_H, sigma_v, sigma_w)
    return (2 * (s.w - s.H) / (2 * s.w - s.H + s.v + _root(s))) ** 2


def _root(s: Variances) -> float:
    return math.sqrt((s.H + s.v) * (4 * s.w - 3 * s.H + s.v))
