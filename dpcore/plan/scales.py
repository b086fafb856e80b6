"""The standard deviations of the noise that a step adds, and why they are enough.

Notation: C bounds the norm of one example's clipped vector (C_eff), s is the clean sum of a step, B the denominator,
and sigma the noise multiplier of the whole release: it must cost as much as one Gaussian release of multiplier sigma.

- One vector: noise sigma C on s.
- Independent moments: s and ``(s/B)^2`` (coordinate by coordinate) are released, each with multiplier sqrt(2) sigma;
  together ``1/(2 sigma^2) + 1/(2 sigma^2) = 1/sigma^2``. Adding a vector c, ``||c|| <= C``, to a sum s of at most
  B_max - 1 others moves the square by ``(s + c)^2 - s^2 = c (2 s + c)``, whose norm is at most
  ``||c|| (2 ||s|| + ||c||) <= C (2 (B_max - 1) C + C) = (2 B_max - 1) C^2``; divided by B^2 for the averages. B_max is
  a hard maximum: under Poisson sampling there is none, and no noise is enough. Under secret sampling with a maximum
  the bound holds given the batch: given which others are in it, s without c is one known vector, and the pair either
  stays as it is or, with the probability that the example is in, moves by one known vector of norm 1/sigma in units of
  its noise. That is the subsampled Gaussian that the events of truncated and cyclic sampling count, under zero-out.
- Joint moments, batches of one example: the vector ``(g, k g^2)`` is released with noise sigma C on each coordinate,
  under replace-one adjacency. Its sensitivity is that of g alone, 2C, for k <= 1/(sqrt(2) C). Proof with C = 1 and d
  = g - g', m = g + g', so that ``g^2 - g'^2 = d m`` in each coordinate. To show: ``|d|^2 + (1/2) sum d_i^2 m_i^2 <=
  4``. From |g|, |g'| <= 1 follow ``|d|^2 + |m|^2 + 2 |d.m| <= 4`` and ``|d_i| + |m_i| <= 2``; so it is enough that
  ``(1/2) sum d_i^2 m_i^2 <= |m|^2 + 2 p`` with p = |d.m|. That holds if every d_i^2 <= 2. Otherwise one coordinate
  i has d_i^2 > 2; the others have ``D = sum d_j^2 <= 4 - d_i^2 < 2``. What is missing is ``(d_i^2/2 - 1) m_i^2``; at
  hand are 2 p and ``(1 - D/2) sum m_j^2 >= a (q - p)^2`` with q = |d_i m_i| and a = (1 - D/2)/D, for ``q - p <= |sum
  d_j m_j| <= sqrt(D sum m_j^2)``. Now ``2 p + a (q - p)^2`` is least at p = 0 if a q <= 1, where ``a d_i^2 >= d_i^2/2
  - 1`` because D <= 4 - d_i^2 and d_i^2 >= 2; and else it is ``2 q - 1/a >= q``, where ``|d_i| >= (d_i^2/2 - 1)
  |m_i|`` because |m_i| <= 2 - |d_i|. For two coordinates and more the bound is tight (it is reached near g = -g').
  For one coordinate, ``d^2 (1 + k^2 (2 - d)^2) <= 4`` for all d in [0, 2] allows ``k^2 <= (2 + d)/(d^2 (2 - d))``,
  least at d = sqrt(5) - 1: k <= 1.66509.
  Relative to the sensitivity 2C the noise has multiplier sigma / 2, as in the event.
- Adaptive clip norm: s and the sum of the examples' bits, each +-1/2, or 0 for an example that contributes nothing, are
  released about one and the same batch. C is the present norm, a function of earlier releases. If an example is
  added, removed or zeroed out, s moves by at most C and the bits by at most 1/2. With noise z C on s and sigma_b on the
  bits, the pair in units of its noise moves by at most ``sqrt(1/z^2 + 1/(2 sigma_b)^2)``: one Gaussian release of
  multiplier sigma for ``z = (1/sigma^2 - 1/(2 sigma_b)^2)^(-1/2)``. It needs 2 sigma_b > sigma. If an example is
  replaced, or removed while another takes its place, both bounds double, and so does the pair's: the event's multiplier
  relative to the doubled sensitivity is sigma / 2, as for s alone. If an example adds m clipped vectors, both are m
  times as large. Nothing here depends on how the batch is drawn: sampling amplifies one Gaussian release, of a vector
  with one more coordinate.

References
----------
Andrew, Thakkar, McMahan, Ramaswamy 2021 (adaptive clipping), theorem 1.
Private adaptive optimizers, section 3.2; algorithms.md 5, 10.7 and 10.15.
"""

import math

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.stages.updates import SecondMoment, Update

JOINT_BOUND = 1 / math.sqrt(2)
"""k C of the joint vector (g, k g^2), at most, for any number of coordinates."""

JOINT_BOUND_1D = 1.665
"""The same for a single coordinate."""


def gradient_noise(update: Update, sigma: float, contribution: float) -> float:
    """Return the standard deviation of the noise on each coordinate of the sum.

    Parameters
    ----------
    update : Update
        Determines whether a second moment is released with the gradient.
    sigma, contribution : float
        Noise multiplier, and C_eff.
    """
    share = math.sqrt(2) if update.second_moment == "independent" else 1.0
    return share * sigma * contribution


def raised_multiplier(sigma: float, bit_noise: float) -> float:
    """Return z of the clipped sum, so that it and the bits, with noise `bit_noise`, cost one release of sigma."""
    if sigma == 0:
        return 0.0
    if not 2 * bit_noise > sigma:
        raise PrivacyError(
            f"bit_noise_std={bit_noise!r}: must be more than half of noise_multiplier={sigma!r}, or the bits of "
            f"adaptive_clip cost more than the whole release may; {sigma:.4g} raises the noise on the gradients "
            "by 15.5 %, more raises it by less"
        )
    return sigma / math.sqrt(1 - (sigma / (2 * bit_noise)) ** 2)


def square_noise(
    update: Update, sigma: float, contribution: float, batch_size: float, max_batch_size: int | None
) -> float:
    """Return the standard deviation of the noise on each coordinate of the squared average; 0 if none is released.

    Parameters
    ----------
    update, sigma, contribution
        As in `gradient_noise`.
    batch_size, max_batch_size : float, int or None
        B, and B_max, which "independent" needs.
    """
    if update.second_moment == "independent":
        assert max_batch_size is not None
        return math.sqrt(2) * sigma * (2 * max_batch_size - 1) * contribution**2 / batch_size**2
    if update.second_moment == "joint":
        return sigma * contribution / joint_scale(update, contribution)
    return 0.0


def joint_scale(update: Update, contribution: float) -> float:
    """Return k of the joint vector (g, k g^2): the update's own, or the largest that any dimension allows."""
    assert isinstance(update, SecondMoment)
    return JOINT_BOUND / contribution if update.joint_scale is None else update.joint_scale


def check_joint_scale(update: Update, contribution: float, dimension: int) -> None:
    """Refuse a joint scale for which the pair's sensitivity exceeds that of the gradient."""
    bound = (JOINT_BOUND_1D if dimension == 1 else JOINT_BOUND) / contribution
    if update.second_moment == "joint" and joint_scale(update, contribution) > bound * (1 + 1e-12):
        raise ArgumentError(
            f"joint_scale={joint_scale(update, contribution)!r}: must be at most {bound:.6g} for the clip norm "
            f"{contribution:g} in dimension {dimension}, or the pair is more sensitive than the gradient"
        )
