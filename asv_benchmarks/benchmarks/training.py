"""Private training steps through the PyTorch edge: the papers' CNN, and the cost of a ledger."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dpcore

from .common import BACKENDS, CHECK, require, require_torch, synchronize, values

METHODS = ("disk",) if CHECK else ("dp_sgd", "disk")
EXAMPLES, BATCH, STEPS = 512, 64, 1_000


def endless(run: Any) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from run.loader


class CnnStep:
    """A batch of 64 images of 28 by 28, 70,122 parameters; DiSK takes two gradients of each example."""

    params = (BACKENDS, METHODS)
    param_names = ("backend", "method")

    def setup(self, backend: str, method: str) -> None:
        require(backend)
        torch = require_torch()
        from dpcore.torch import make_private
        from dpcore.torch.model import models

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
        self.batches = endless(self.run)
        self.time_step(backend, method)

    def time_step(self, backend: str, method: str) -> None:
        self.run.step(next(self.batches))
        synchronize(backend)

    def peakmem_step(self, backend: str, method: str) -> None:
        self.run.step(next(self.batches))

    def peakmem_reference(self, backend: str, method: str) -> None:
        pass


class LedgerStep:
    """64 examples of 64 numbers through logistic regression: a step so short that the ledger's share shows."""

    params = ("without", "with")
    param_names = ("ledger",)

    def setup(self, ledger: str) -> None:
        torch = require_torch()
        from dpcore.ledger import Ledger
        from dpcore.torch import make_private

        torch.manual_seed(0)
        self.folder = tempfile.TemporaryDirectory()
        paid = Ledger.create(Path(self.folder.name) / "ledger.db") if ledger == "with" else None
        data = (torch.from_numpy(values((EXAMPLES, 64))), torch.arange(EXAMPLES) % 10)
        chosen = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=BATCH)
        options = {"steps": 1_000_000, "sampling": "fixed_order", "ledger": paid}
        self.run = make_private(torch.nn.Linear(64, 10), data, chosen, **options)
        self.batches = endless(self.run)
        for _ in range(3 if CHECK else 300):  # until rows are reserved in blocks of their full length
            self.time_step(ledger)

    def teardown(self, ledger: str) -> None:
        self.run.close()
        self.folder.cleanup()

    def time_step(self, ledger: str) -> None:
        self.run.step(next(self.batches))
