"""The protocol of a noise stage: Gaussian noise on the sum, relative to the clip's sensitivity."""

from __future__ import annotations

from typing import Any, Protocol


class Noise(Protocol):
    """Noise of standard deviation ``noise_multiplier * sensitivity`` on each coordinate of the sum."""

    @property
    def noise_multiplier(self) -> float | None:
        """The seed noise's standard deviation in units of the sensitivity; None until calibrated."""

    @property
    def strategy(self) -> Any:
        """The `dpcore.strategies.Strategy` that correlates the noise of the steps, or None."""

    def with_noise_multiplier(self, noise_multiplier: float) -> Noise:
        """Return the same noise at another multiplier."""
