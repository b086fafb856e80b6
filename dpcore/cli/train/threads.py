"""The number of threads that suits a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dpcore.cli.train.training import Training

# Whose work is that of a product of parameters and examples; convolutions have far more.
_DENSE = ("logistic", "mlp")
# Products of a pass over a batch, below which handing work to threads takes longer than the work.
_SMALL = 1 << 24
# With one of them a person has chosen.
_CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def suited(training: Training) -> Iterator[None]:
    """Let a small model's steps run in one thread while the block runs, unless the environment says how many."""
    former = torch.get_num_threads()
    products = sum(p.numel() for p in training.model.parameters()) * training.plan.batch_size
    small = training.settings.model in _DENSE and products < _SMALL
    if small and not any(name in os.environ for name in _CHOSEN):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)
