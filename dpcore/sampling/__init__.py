"""Sampling: which examples take part in which step. Indices, never data; the secret is an argument, never a field."""

from dpcore.sampling.base import Sampler, Shard, check_sampler, is_sampler, shard
from dpcore.sampling.cyclic_poisson import CyclicPoissonSampler
from dpcore.sampling.draw import Indices
from dpcore.sampling.factory import NAMES, foreign, from_description, sampler
from dpcore.sampling.orders import FixedBatches, FixedOrderSampler, ShuffledSampler
from dpcore.sampling.poisson import FixedSizeSampler, PoissonSampler, RandomAllocationSampler, TruncatedPoissonSampler
from dpcore.sampling.users import UserSampler

__all__ = [
    "NAMES", "CyclicPoissonSampler", "FixedBatches", "FixedOrderSampler", "FixedSizeSampler", "Indices",
    "PoissonSampler", "RandomAllocationSampler", "Sampler", "Shard", "ShuffledSampler", "TruncatedPoissonSampler",
    "UserSampler", "check_sampler", "foreign", "from_description", "is_sampler", "sampler", "shard",
]  # fmt: skip
