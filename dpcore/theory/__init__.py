"""Numbers of the papers' theory: settings, factors and conditions, from public quantities only."""

from dpcore.theory.kalman import kalman_rate, kappa_from_variances, steady_variance
from dpcore.theory.moments import Regime, bias_correction_regime
from dpcore.theory.signal import noise_factor, pmlf_variance_factor
from dpcore.theory.srgd import AcceleratedParameters, accelerated_srgd_parameters

__all__ = [
    "AcceleratedParameters",
    "Regime",
    "accelerated_srgd_parameters",
    "bias_correction_regime",
    "kalman_rate",
    "kappa_from_variances",
    "noise_factor",
    "pmlf_variance_factor",
    "steady_variance",
]
