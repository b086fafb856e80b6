"""The noise stage: Gaussian noise on the sum, relative to the clip's sensitivity."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

from dpcore.errors import ArgumentTypeError
from dpcore.spec.validate import noise, plain
from dpcore.stages.strategies import NamedStrategy, Strategy

__all__ = ["CorrelatedGaussian", "IndependentGaussian", "Noise"]


class Noise(Protocol):
    """Noise of standard deviation ``noise_multiplier * sensitivity`` on each coordinate of the sum."""

    @property
    def noise_multiplier(self) -> float | None:
        """The seed noise's standard deviation in units of the sensitivity; None until calibrated."""

    @property
    def strategy(self) -> Any:
        """The `dpcore.strategies.Strategy` that correlates the noise of the steps, or None."""

    def with_noise_multiplier(self, noise_multiplier: float) -> "Noise":
        """Return the same noise at another multiplier."""


@dataclass(frozen=True)
class _Gaussian:
    noise_multiplier: float | None

    def __post_init__(self) -> None:
        plain(self)
        if self.noise_multiplier is not None:
            noise(noise_multiplier=self.noise_multiplier)

    def with_noise_multiplier(self, noise_multiplier: float) -> Self:
        """Return the same noise at another multiplier."""
        return replace(self, noise_multiplier=noise_multiplier)


@dataclass(frozen=True)
class IndependentGaussian(_Gaussian):
    """``s~_t = s_t + noise_multiplier * C_eff * z_t`` with z_t independent standard normals.

    Parameters
    ----------
    noise_multiplier : float or None
        sigma, from 1e-9 to 1e9. 0 adds no noise (epsilon is then infinite); None is calibrated later, from a target
        epsilon.
    """

    noise_multiplier: float | None = None
    strategy: ClassVar[None] = None


@dataclass(frozen=True)
class CorrelatedGaussian(_Gaussian):
    """``s~_t = s_t + noise_multiplier * C_eff * (C^{-1} Z)_t`` with the rows of Z independent standard normals.

    Parameters
    ----------
    noise_multiplier : float or None
        sigma >= 0, of the seed noise: the noise of step t has standard deviation sigma C_eff times the norm of row t of
        C^{-1}. 0 adds no noise (epsilon is then infinite); None is calibrated later, from a target epsilon.
    strategy : Strategy or NamedStrategy
        The matrix C, scaled so that its largest column norm is 1; or its name, and the plan makes it.
    """

    strategy: Strategy | NamedStrategy

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (hasattr(self.strategy, "of") and hasattr(self.strategy, "describe")):
            raise ArgumentTypeError(
                f"strategy={self.strategy!r}: must be a strategy of dpcore.strategies; "
                "names and arrays become one by dpcore.strategies.strategy(name, steps)"
            )
