"""Poisson sampling with a hard maximum: where more examples land, a random subset of them is kept."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from dpcore.accounting import Adjacency, TruncatedPoissonSampledGaussian, binomial
from dpcore.errors import ArgumentError
from dpcore.sampling import draw
from dpcore.sampling.base import Indices
from dpcore.sampling.library import LibrarySampler
from dpcore.sampling.poisson import WORDS, coin
from dpcore.spec import validate

OVERFLOW: Final = 1e-6
"""The default maximum is passed, and the batch cut, with a smaller probability than this a step."""


def smallest_maximum(size: int, sample_rate: float, overflow: float = OVERFLOW) -> int:
    """Return the smallest B with Pr[Bin(size, sample_rate) > B] < overflow, at least 1.

    The tail falls in B and is 0 at B = size.
    """

    def enough(most: int) -> bool:
        return binomial.more_than(most, size, sample_rate) < overflow

    return 1 + bisect_left(range(1, size), True, key=enough)


@dataclass(frozen=True, init=False)
class TruncatedPoissonSampler(LibrarySampler):
    """Poisson coins, and a uniformly random subset of `max_batch_size` where more examples land in a step.

    Give `batch_size` or `sample_rate`, as for `PoissonSampler`.

    Parameters
    ----------
    dataset_size : int
        Number of examples. Treated as public.
    batch_size : float, optional
        Expected examples that land in a step, the fixed denominator of averages. The cut takes next to nothing off the
        true expectation, unless `max_batch_size` is close to it.
    sample_rate : float, optional
        Probability to land; by default batch_size / dataset_size. As an attribute: rounded down to a multiple of 2^-32.
    max_batch_size : int, optional
        At least `batch_size`, at most `dataset_size`. By default the smallest one that is passed with a probability
        below 1e-6 a step.

    Notes
    -----
    Guarantee: the coins are those of `PoissonSampler` for the same key and step. Given them, every subset of the size
    kept is equally likely: it is drawn by words of the same row that no coin uses (elements from `dataset_size` on).

    The event is described under zero-out (derivation: `dpcore.accounting.phases`): an example whose vector is zero
    still tosses its coin and takes its place.
    """

    dataset_size: int
    batch_size: float
    sample_rate: float
    max_batch_size: int
    kind = "truncated poisson"
    note = (
        "each example lands in each step independently with the given probability; where more land than the maximum, a "
        "uniformly random subset of that size is kept"
    )
    stated = ("sample_rate", "max_batch_size")
    adjacency = Adjacency.ZERO_OUT  # without an example's coin, a full batch would have room for another one

    def __init__(
        self,
        *,
        dataset_size: int,
        batch_size: float | None = None,
        sample_rate: float | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        size = validate.integer(dataset_size=dataset_size, minimum=1)
        expected, threshold = coin(size, batch_size, sample_rate)
        rate = threshold / WORDS
        if max_batch_size is None:
            most = max(smallest_maximum(size, rate), math.ceil(expected))
        else:
            most = validate.integer(max_batch_size=max_batch_size, minimum=1)
        if not expected <= most <= size:
            raise ArgumentError(
                f"max_batch_size={most!r}: must be at least the expected batch size {expected:g}, or most batches are "
                f"cut off, and at most dataset_size={size}; dpcore.sampling.FixedSizeSampler takes exactly as many"
            )
        object.__setattr__(self, "dataset_size", size)
        object.__setattr__(self, "batch_size", expected)
        object.__setattr__(self, "sample_rate", rate)
        object.__setattr__(self, "max_batch_size", most)

    def _batch(self, key: bytes, step: int) -> Indices:
        # A shard, too, tosses the coins of all examples: which ones are cut depends on all that landed.
        words = draw.row_words(key, step)
        batch = draw.coins(words, round(self.sample_rate * WORDS), 0, self.dataset_size)
        if batch.size > self.max_batch_size:
            batch = batch[draw.subset(draw.after(words, self.dataset_size), batch.size, self.max_batch_size)]
        return batch

    def event(self, noise_multiplier: float, steps: int) -> TruncatedPoissonSampledGaussian:
        """Return the event of `steps` steps; under zero-out the sensitivity of the sum is C itself."""
        return TruncatedPoissonSampledGaussian(
            self.dataset_size, self.sample_rate, self.max_batch_size, noise_multiplier, steps, Adjacency.ZERO_OUT
        )
