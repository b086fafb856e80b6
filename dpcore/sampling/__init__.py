"""Sampling: which examples take part in which step. Indices, never data; the secret is an argument, never a field."""

from __future__ import annotations

from dpcore.sampling.base import Indices, Sampler
from dpcore.sampling.fixed_batches import FixedBatches
from dpcore.sampling.fixed_order import FixedOrderSampler
from dpcore.sampling.fixed_size import FixedSizeSampler
from dpcore.sampling.poisson import PoissonSampler

__all__ = ["FixedBatches", "FixedOrderSampler", "FixedSizeSampler", "Indices", "PoissonSampler", "Sampler"]
