"""Fresh Gaussian noise at every step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dpcore.spec.validate import non_negative, plain


@dataclass(frozen=True)
class IndependentGaussian:
    """``s~_t = s_t + noise_multiplier * C_eff * z_t`` with z_t independent standard normals.

    Parameters
    ----------
    noise_multiplier : float or None
        sigma >= 0. 0 adds no noise (epsilon is then infinite); None is calibrated later, from a target epsilon.
    """

    noise_multiplier: float | None = None
    strategy: ClassVar[None] = None

    def __post_init__(self) -> None:
        plain(self)
        if self.noise_multiplier is not None:
            non_negative(noise_multiplier=self.noise_multiplier)

    def with_noise_multiplier(self, noise_multiplier: float) -> IndependentGaussian:
        """Return the same noise at another multiplier."""
        return replace(self, noise_multiplier=noise_multiplier)
