"""Log moments of a composition: they say how to tilt it, how wide it is, and how far apart two bounds are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpcore.accounting.pld.discretize import Masses
from dpcore.accounting.pld.loss import Array


class Moments:
    """K(theta) = log E_P e^(theta L) of a composition, infinite masses left out, and its derivatives."""

    def __init__(self, parts: Sequence[Masses]) -> None:
        self.parts = parts
        with np.errstate(divide="ignore"):
            self._logs = [np.log(part.p) for part in parts]
        self._losses = [part.losses for part in parts]

    def tilted(self, theta: float) -> list[tuple[Array, Array]]:
        """Return the tilted masses (steps, n) and the log moments (steps,) of each part."""
        found = []
        for logs, losses in zip(self._logs, self._losses, strict=True):
            exponent = logs + theta * losses
            top = np.maximum(exponent.max(axis=1, keepdims=True), -1e300)  # a lower bound may have no mass at all
            weights = np.exp(exponent - top)
            total = np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
            found.append((weights / total, (top + np.log(total))[:, 0]))
        return found

    def __call__(self, theta: float) -> tuple[float, float, float]:
        """Return K, K' and K'' at theta."""
        value = mean = variance = 0.0
        for (p, log_moment), losses, part in zip(self.tilted(theta), self._losses, self.parts, strict=True):
            first = (p * losses).sum(axis=1)
            second = (p * (losses - first[:, None]) ** 2).sum(axis=1)
            value += float(part.counts @ log_moment)
            mean += float(part.counts @ first)
            variance += float(part.counts @ second)
        return value, mean, variance

    def log_moment(self, theta: float) -> float:
        """Return K at theta."""
        return float(sum(part.counts @ log for (_, log), part in zip(self.tilted(theta), self.parts, strict=True)))
