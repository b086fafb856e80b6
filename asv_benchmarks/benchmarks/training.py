"""One private training step of the papers' CNN through the PyTorch edge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dpcore

from .common import BACKENDS, require, require_torch, synchronize, values

METHODS = ("dp_sgd", "disk")
EXAMPLES, BATCH, STEPS = 512, 64, 1_000


class CnnStep:
    """A batch of 64 images of 28 by 28, 70,122 parameters; DiSK takes two gradients of each example."""

    params = (BACKENDS, METHODS)
    param_names = ("backend", "method")

    def setup(self, backend: str, method: str) -> None:
        require(backend)
        torch = require_torch()
        from dpcore.torch import make_private, models

        torch.manual_seed(0)
        device = "cuda" if backend == "triton" else "cpu"
        data = (
            torch.from_numpy(values((EXAMPLES, 28, 28))),
            torch.arange(EXAMPLES) % 10,
        )
        model = models.build("cnn-5", (28, 28), 10).to(device)
        chosen = getattr(dpcore.methods, method)(lr=0.1, noise_multiplier=1.0, batch_size=BATCH)
        with dpcore.use_backend(backend):
            # A fixed order: every step then has the same number of examples.
            self.run = make_private(model, data, chosen, steps=STEPS, sampling="fixed_order")
        self.batches = self.endless()
        self.time_step(backend, method)

    def endless(self) -> Iterator[Any]:
        while True:
            yield from self.run.loader

    def time_step(self, backend: str, method: str) -> None:
        self.run.step(next(self.batches))
        synchronize(backend)

    def peakmem_step(self, backend: str, method: str) -> None:
        self.run.step(next(self.batches))

    def peakmem_reference(self, backend: str, method: str) -> None:
        pass
