"""The spectrum of the gradient along a private path, for docs/studies/scattering.py: a private diagnostic."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from study import rounded

from dpcore.theory.analysis import spectrum

FREQUENCIES = 60


def clipped_sum(weight: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the examples' clipped gradients for softmax regression, v / (norm + 0.01): the automatic clip, C = 1.

    An example's gradient is (p - y) x^T, whose norm is that of p - y times that of x.
    """
    errors = torch.softmax(inputs @ weight.T, 1) - F.one_hot(labels, len(weight))
    norms = errors.norm(dim=1) * inputs.norm(dim=1)
    return (errors / (norms + 0.01)[:, None]).T @ inputs


class Watch:
    """Clipped averages without noise at every step: of the batch, and of a fixed part of the data.

    The batch's is what the noise is added to. The fixed part's has next to no randomness of batches: it is the signal
    that a filter is to keep.
    """

    def __init__(self, data: tuple[torch.Tensor, torch.Tensor], subset: int, batch_size: int) -> None:
        self.fixed = data[0][:subset], data[1][:subset]
        self.batch_size = batch_size
        self.batches: list[Any] = []
        self.signals: list[Any] = []

    def see(self, weight: torch.Tensor, batch: Any) -> None:
        """Look at the parameters before a step, and at its batch."""
        self.batches.append((clipped_sum(weight, *batch) / self.batch_size).flatten().numpy())
        self.signals.append((clipped_sum(weight, *self.fixed) / len(self.fixed[0])).flatten().numpy())

    def spectra(self) -> dict[str, Any]:
        """Power spectral densities per coordinate over the second half of the run, and shares of power."""
        half = slice(len(self.batches) // 2, None)
        found: dict[str, Any] = {}
        for name, values in (("signal", self.signals), ("batch", self.batches)):
            sequence = np.stack(values[half])
            lags = (len(sequence) - 1) // 2
            phi = spectrum.autocorrelation(sequence, lags)
            x = np.geomspace(1 / max(lags, 4), 0.5, FREQUENCIES)
            found["frequencies"] = rounded(x)
            found[name] = rounded(spectrum.power_spectral_density(phi, x) / sequence.shape[1])
            found[f"{name}_power"] = rounded(phi[0] / sequence.shape[1])
            found[f"{name}_below"] = {f"{f:g}": rounded(spectrum.share_below(phi, f)) for f in (0.01, 0.05, 0.1)}
        return {"spectrum": found}
