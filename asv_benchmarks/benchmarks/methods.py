"""Whole private steps on arrays: query, clip, sum, noise, filter, update, for each method."""

from __future__ import annotations

from typing import Any

import numpy as np

import dpcore

from .common import BACKENDS, KEY, require, synchronize, values

METHODS = ("dp_sgd", "doppler", "disk", "dp_adam")
EXAMPLES, BATCH, SIZE, STEPS = 1_000, 64, 20_000, 5


class Minimize:
    """Five steps of a quadratic with 64 examples a step in 20,000 dimensions."""

    params = (BACKENDS, METHODS)
    param_names = ("backend", "method")

    def setup(self, backend: str, method: str) -> None:
        require(backend)
        self.centers = values((EXAMPLES, SIZE // 100)).repeat(100, axis=1)
        self.method = getattr(dpcore.methods, method)(lr=0.1, noise_multiplier=1.0)
        self.sampler = dpcore.sampling.FixedOrderSampler(dataset_size=EXAMPLES, batch_size=BATCH)
        self.x0 = np.zeros(SIZE, np.float32)
        self.time_five_steps(backend, method)

    def gradient(self, x: Any, indices: Any) -> Any:
        return x - self.centers[indices]

    def time_five_steps(self, backend: str, method: str) -> None:
        with dpcore.use_backend(backend):
            dpcore.minimize(self.gradient, self.x0, self.sampler, self.method, steps=STEPS, key=KEY)
        synchronize(backend)
