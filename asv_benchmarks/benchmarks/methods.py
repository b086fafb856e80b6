"""Whole private steps on arrays: query, clip, sum, noise, filter, update, for each method."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np

import dpcore

from .common import BACKENDS, CHECK, KEY, require, synchronize, values

EXAMPLES, BATCH, SIZE, STEPS = 1_000, 64, 2_000 if CHECK else 20_000, 5

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp_sgd": ("dp_sgd", {}),
    "doppler": ("doppler", {}),
    "doppler_adam": ("doppler", {"base": "adam"}),
    "disk": ("disk", {}),
    "disk_doppler": ("disk", {"filter": "first-order v1"}),
    "pmlf": ("pmlf", {}),
    "inner_outer": ("inner_outer", {}),
    "memf_square_root": ("memf", {"strategy": "square-root"}),
    "memf_tree": ("memf", {"strategy": "tree"}),
    "srg_memf_tree": ("srg_memf", {"strategy": "tree"}),
    "accelerated_srgd": ("accelerated_srgd", {}),
    "dp_adam": ("dp_adam", {}),
    "dp_adam_independent": ("dp_adam", {"variant": "independent_moments"}),
    "dp_adam_bias_corrected": ("dp_adam", {"variant": "bias_corrected"}),
    "dp_adam_scaled": ("dp_adam", {"variant": "scale_then_privatize"}),
    "dp_adagrad": ("dp_adagrad", {}),
}
if CHECK:
    METHODS = {name: METHODS[name] for name in ("disk_doppler", "srg_memf_tree", "dp_adam_scaled")}


class Minimize:
    """Five steps of a quadratic with 64 examples a step in 20,000 dimensions."""

    params = (BACKENDS, tuple(METHODS))
    param_names = ("backend", "method")

    def setup(self, backend: str, method: str) -> None:
        require(backend)
        self.centers = values((EXAMPLES, SIZE // 100)).repeat(100, axis=1)
        name, settings = METHODS[method]
        self.method = getattr(dpcore.methods, name)(lr=0.1, noise_multiplier=1.0, **settings)
        self.sampler = dpcore.sampling.FixedOrderSampler(dataset_size=EXAMPLES, batch_size=BATCH)
        self.x0 = np.zeros(SIZE, np.float32)
        self.time_five_steps(backend, method)

    def gradient(self, x: Any, indices: Any) -> Any:
        return x - self.centers[indices]

    def time_five_steps(self, backend: str, method: str) -> None:
        with dpcore.use_backend(backend):
            dpcore.minimize(self.gradient, self.x0, self.sampler, self.method, steps=STEPS, key=KEY)
        synchronize(backend)


class State:
    """Memory that a run keeps in addition to the parameters, in vectors of their size."""

    params = (tuple(METHODS),)
    param_names = ("method",)

    def setup(self, method: str) -> None:
        name, settings = METHODS[method]
        self.method = getattr(dpcore.methods, name)(lr=0.1, noise_multiplier=1.0, **settings)
        self.sampler = dpcore.sampling.FixedOrderSampler(dataset_size=EXAMPLES, batch_size=BATCH)
        self.x0 = np.zeros(1_000_000, np.float32)

    def track_state_vectors(self, method: str) -> float:
        from dpcore.mechanism.mechanism import Mechanism
        from dpcore.plan.plan import Plan
        from dpcore.spec.backends import load_backend
        from dpcore.spec.keys import RunKeys
        from dpcore.spec.layout import Layout

        plan, backend = Plan(self.method, self.sampler, STEPS), load_backend("numpy")
        layout, keys = Layout.of([("x", self.x0.shape)]), RunKeys.new(KEY)
        tracemalloc.start()
        try:
            kept = Mechanism(plan, layout, [self.x0], backend=backend, keys=keys)
            now, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        del kept
        return round(now / self.x0.nbytes, 2)

    track_state_vectors.unit = "vectors"  # type: ignore[attr-defined]
