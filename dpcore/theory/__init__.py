"""The papers' theory in numbers: settings, factors and conditions, from public quantities only."""

from dpcore.theory.papers import (
    AcceleratedParameters,
    Regime,
    accelerated_srgd_parameters,
    bias_correction_regime,
    kalman_rate,
    kappa_from_variances,
    pmlf_variance_factor,
    steady_variance,
    theoretical_noise_factor,
)

__all__ = [
    "AcceleratedParameters", "Regime", "accelerated_srgd_parameters", "bias_correction_regime", "kalman_rate",
    "kappa_from_variances", "pmlf_variance_factor", "steady_variance", "theoretical_noise_factor",
]  # fmt: skip
