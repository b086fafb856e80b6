"""Gaussian noise that a strategy correlates over the steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpcore.errors import ArgumentTypeError
from dpcore.spec.validate import non_negative, plain
from dpcore.stages.strategies import NamedStrategy, Strategy


@dataclass(frozen=True)
class CorrelatedGaussian:
    """``s~_t = s_t + noise_multiplier * C_eff * (C^{-1} Z)_t`` with the rows of Z independent standard normals.

    Parameters
    ----------
    noise_multiplier : float or None
        sigma >= 0, of the seed noise: the noise of step t has standard deviation sigma C_eff times the norm of row t of
        C^{-1}. 0 adds no noise (epsilon is then infinite); None is calibrated later, from a target epsilon.
    strategy : Strategy or NamedStrategy
        The matrix C, scaled so that its largest column norm is 1; or its name, and the plan makes it.
    """

    noise_multiplier: float | None
    strategy: Strategy | NamedStrategy

    def __post_init__(self) -> None:
        plain(self)
        if self.noise_multiplier is not None:
            non_negative(noise_multiplier=self.noise_multiplier)
        if not (hasattr(self.strategy, "of") and hasattr(self.strategy, "describe")):
            raise ArgumentTypeError(
                f"strategy={self.strategy!r}: must be a strategy of dpcore.stages.strategies; "
                "names and arrays become one by dpcore.stages.strategies.strategy(name, steps)"
            )

    def with_noise_multiplier(self, noise_multiplier: float) -> CorrelatedGaussian:
        """Return the same noise at another multiplier."""
        return replace(self, noise_multiplier=noise_multiplier)
