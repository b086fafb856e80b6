"""The papers' theory in numbers: settings, factors, conditions and bounds, from public quantities only."""

from dpcore.theory.convergence import (
    DiskConvergence,
    DiskSettings,
    DopplerConvergence,
    Tradeoff,
    accelerated_srgd_excess_risk,
    disk_convergence,
    disk_settings,
    disk_tradeoff,
    doppler_convergence,
    doppler_tradeoff,
    pmlf_largest_rate,
)
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
    "AcceleratedParameters", "DiskConvergence", "DiskSettings", "DopplerConvergence", "Regime", "Tradeoff",
    "accelerated_srgd_excess_risk", "accelerated_srgd_parameters", "bias_correction_regime", "disk_convergence",
    "disk_settings", "disk_tradeoff", "doppler_convergence", "doppler_tradeoff", "kalman_rate", "kappa_from_variances",
    "pmlf_largest_rate", "pmlf_variance_factor", "steady_variance", "theoretical_noise_factor",
]  # fmt: skip
