"""The share of noise that a window of momentum, or a filter, lets through."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpcore.spec.validate import decay, integer, positive


class VarianceFactor(NamedTuple):
    """`factor` is 1/rho^2, what the variance is multiplied by; `rho` divides the standard deviation."""

    factor: float
    rho: float


def pmlf_variance_factor(beta: float, window: int) -> VarianceFactor:
    """Return what DP-PMLF's window does to the variance of independent per-example gradients.

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
    """Return ``1 / (2 SNR)``, what a filter of that signal-to-noise ratio multiplies the noise term of the bound by.

    Parameters
    ----------
    snr : float
        ``(sum_t sum_tau c_tau kappa_tau) / (sum_t sum_tau kappa_tau^2)``, greater than 0; 1/2 without a filter.

    References
    ----------
    DOPPLER (Zhang et al.), theorem 2.
    """
    return 1 / (2 * positive(snr=snr))
