"""Numbers of the papers' theorems: of a Kalman filter, a window and a bias correction, and the parameters of SRGD."""

import math
from typing import NamedTuple

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.spec.validate import decay, integer, non_negative, open_unit, positive

# The steady state of DiSK's scalar Kalman filter.
#
# Its error variance obeys ``p <- (1 - k) (p + sH + sv)`` under the gain ``k = (p + sH + sv) / (p + sw + sv)``, where sX
# is short for sigma_X^2: of the Hessian's displacement product, of the gradient's own motion, and of the noise.


class Variances(NamedTuple):
    """Variances over `unit`, so that no square overflows; gains do not depend on the unit."""

    H: float
    v: float
    w: float
    unit: float


def variances(sigma_H: float, sigma_v: float, sigma_w: float) -> Variances:
    """Return sigma_H, sigma_v and sigma_w squared; refuse them if the filter has no gain in (0, 1]."""
    sigmas = (non_negative(sigma_H=sigma_H), non_negative(sigma_v=sigma_v), non_negative(sigma_w=sigma_w))
    scale = max(sigmas)
    H, v, w = ((sigma / scale) ** 2 if scale else 0.0 for sigma in sigmas)
    given = f"sigma_H={sigma_H!r}, sigma_v={sigma_v!r}, sigma_w={sigma_w!r}"
    if H + v == 0:
        raise ArgumentError(
            f"{given}: sigma_H and sigma_v must not both be 0 (or tiny against sigma_w): the gain would tend to 0 "
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

    Here ``R = sqrt((sH + sv) (4 sw - 3 sH + sv))``; the difference is not formed.

    Parameters
    ----------
    sigma_H, sigma_v, sigma_w : float
        Standard deviations, per coordinate, of the Hessian's displacement product, of the gradient's own motion, and
        of the noise in the released average.

    Raises
    ------
    ArgumentError
        If the gain would leave (0, 1], or the root is not real; so also the functions below.

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


class VarianceFactor(NamedTuple):
    """`factor` is 1/rho^2, the factor of the variance; `rho` divides the standard deviation."""

    factor: float
    rho: float


def pmlf_variance_factor(beta: float, window: int) -> VarianceFactor:
    """Return the factor of DP-PMLF's window on the variance of independent per-example gradients.

    ``factor = sum_j (beta^j / c)^2`` with ``c = sum_j beta^j``, j < k = `window` >= 1, 0 <= `beta` < 1, and
    ``rho^2 = 1 / factor = (1 + beta) (1 - beta^k) / ((1 - beta) (1 + beta^k))``.

    References
    ----------
    DP-PMLF (Xu et al.), definition of rho in section 4.
    """
    beta, window = decay(beta=beta), integer(1, window=window)
    power = beta**window
    # (1 - beta^k) / (1 - beta), which cancels near beta = 1.
    ratio = float(-np.expm1(window * np.log(beta))) / (1 - beta) if beta > 0 else 1.0
    rho_squared = (1 + beta) * ratio / (1 + power)
    return VarianceFactor(1 / rho_squared, float(np.sqrt(rho_squared)))


def theoretical_noise_factor(snr: float) -> float:
    """Return ``1 / (2 SNR)``, the factor of a filter with that signal-to-noise ratio on the bound's noise term.

    Parameters
    ----------
    snr : float
        ``(sum_t sum_tau c_tau kappa_tau) / (sum_t sum_tau kappa_tau^2)``, greater than 0; 1/2 without a filter.

    References
    ----------
    DOPPLER (Zhang et al.), theorem 2.
    """
    return 1 / (2 * positive(snr=snr))


# The range in which a second moment can be debiased.


class Regime(NamedTuple):
    """Two conditions; a condition holds if its ratio is at least `threshold`.

    `same_direction` is ``B / sigma`` against the threshold, for per-example gradients that point one way; `orthogonal`
    is ``sqrt(B) / sigma`` against it, for gradients that are orthogonal.
    """

    threshold: float
    same_direction: float
    orthogonal: float

    @property
    def trustworthy_if_same_direction(self) -> bool:
        """Whether the debiased second moment is seldom negative if all gradients of a batch point one way."""
        return self.same_direction >= self.threshold

    @property
    def trustworthy_if_orthogonal(self) -> bool:
        """Whether it is seldom negative even if the gradients of a batch are orthogonal."""
        return self.orthogonal >= self.threshold


def bias_correction_regime(batch_size: float, noise_multiplier: float, dimension: int, beta2: float = 0.999) -> Regime:
    """Return whether subtracting the noise's variance from Adam's second moment leaves a positive number.

    Parameters
    ----------
    batch_size : float
        B, the expected batch size.
    noise_multiplier : float
        sigma.
    dimension : int
        d, the number of parameters.
    beta2 : float
        Decay of the second moment, in [0, 1). The threshold is ``((1 - beta2)^2 / (1 - beta2^2))^(1/4) sqrt(d)``,
        0.15 sqrt(d) at 0.999.

    Notes
    -----
    The debiased moment of a coordinate with gradient g is g^2 plus an error whose standard deviation is, in the steady
    state and to leading order in the noise, ``s^2 sqrt(2 (1 - beta2) / (1 + beta2))`` with ``s = sigma C / B``. The
    paper's condition is that s^2 times the root without the 2 is at most g^2, for g = C / sqrt(d) (same direction)
    or g = C / sqrt(B d) (orthogonal).

    References
    ----------
    On Design Principles for Private Adaptive Optimizers (Ganesh, McMahan, Thakurta), section 4 equations 2 and 3, and
    equation 6 for any beta2.
    """
    batch_size, sigma = positive(batch_size=batch_size), non_negative(noise_multiplier=noise_multiplier)
    beta2 = decay(beta2=beta2)
    threshold = ((1 - beta2) / (1 + beta2)) ** 0.25 * math.sqrt(integer(1, dimension=dimension))
    if sigma == 0:
        return Regime(threshold, math.inf, math.inf)
    return Regime(threshold, batch_size / sigma, math.sqrt(batch_size) / sigma)


# The parameters under which Accelerated-DP-SRGD has the optimal rate.


class AcceleratedParameters(NamedTuple):
    """The parameters of Accelerated-DP-SRGD: one pass of `steps` batches of `batch_size` examples."""

    batch_size: int
    steps: int
    beta: float
    max_grad_norm: float


def accelerated_srgd_parameters(
    dataset_size: int,
    dimension: int,
    lipschitz: float,
    smoothness: float,
    diameter: float,
    epsilon: float,
    delta: float,
) -> AcceleratedParameters:
    """Return the parameters of theorem 4.10, with the largest batches that it allows.

    Parameters
    ----------
    dataset_size : int
        n, at least 2.
    dimension : int
        d.
    lipschitz : float
        L: no example's gradient is longer.
    smoothness : float
        M: no example's gradient changes faster.
    diameter : float
        Diameter of the constraint set, ||C||_2 in the paper.
    epsilon, delta : float
        The target guarantee. Here it only bounds the batch size.

    Returns
    -------
    AcceleratedParameters
        ``steps = floor(n / B)``; ``beta = M + (8 L + 16 M diam) n^(3/2) / (diam B^2)``, whose inverse is the
        learning rate; and the clip norm ``4 L + 8 M diam`` of the differences. Examples beyond ``steps * B`` are not
        used.

    Raises
    ------
    ArgumentError
        If the dimension is so high that no batch size fulfills the theorem's condition.

    Notes
    -----
    Corrected here:

    - The theorem bounds B by an expression that has ``ln(2.5) / delta`` instead of ``ln(2.5 / delta)``, and the unit
      of M, though it should have none. Both come from the condition of corollary 4.5, which is required here:
      ``d <= (B beta epsilon)^2 / (128 M^2 log2(T)^3 ln(4 T / delta) ln(2.5 / delta))``.
    - The logarithm of T is that of the tree's depth, to base 2, and T >= 2 (lemma 4.3).
    - The printed noise is left out. It is loose, and vanishes at T = 1; the methods calibrate the tree exactly, by the
      nodes that one example touches.

    ``B <= sqrt(n)`` gives ``beta >= 16 M n / B >= 2 M T``, as claim 4.2 requires.

    References
    ----------
    DP-SRG (Choquette-Choo, Ganesh, Thakurta), theorem 4.10, corollary 4.5 and claim 4.2.
    """
    n, d = integer(2, dataset_size=dataset_size), integer(1, dimension=dimension)
    L, M = positive(lipschitz=lipschitz), positive(smoothness=smoothness)
    diam = positive(diameter=diameter)
    epsilon, delta = positive(epsilon=epsilon), open_unit(delta=delta)

    B = np.arange(1, math.isqrt(n) + 1, dtype=np.float64)
    T = n // B
    beta = M + (8 * L + 16 * M * diam) * n**1.5 / (diam * B**2)
    largest = (B * beta * epsilon) ** 2 / (128 * M**2 * np.log2(T) ** 3 * np.log(4 * T / delta) * np.log(2.5 / delta))
    allowed = np.flatnonzero(largest >= d)
    if not allowed.size:
        raise ArgumentError(
            f"dimension={dimension!r}: must be at most {int(largest.max())} under these constants, beyond which the "
            "theorem allows no batch size; a greater dataset_size or epsilon raises it"
        )
    best = allowed[-1]
    return AcceleratedParameters(int(B[best]), int(T[best]), float(beta[best]), 4 * L + 8 * M * diam)
