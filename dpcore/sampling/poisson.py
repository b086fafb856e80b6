"""Fresh draws at every step: coins of all examples, coins with a hard maximum, and subsets of a fixed size."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from dpcore.accounting import (
    Adjacency,
    FixedSizeSampledGaussian,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    TruncatedPoissonSampledGaussian,
    phases,
)
from dpcore.errors import ArgumentError
from dpcore.sampling import draw
from dpcore.sampling.base import Blocks, LibrarySampler, WholeBatches
from dpcore.sampling.draw import Indices
from dpcore.spec import validate

WORDS = 1 << 32


def coin(size: int, batch_size: float | None, sample_rate: float | None) -> tuple[float, int]:
    """Return the expected batch size of `size` examples, and how many of the 2^32 words of a coin are heads.

    Raises `ArgumentError` if neither is given, or both contradict each other; if the rate is no probability, or no coin
    can land.
    """
    if batch_size is None and sample_rate is None:
        raise ArgumentError("batch_size=None: give batch_size (expected examples a step) or sample_rate")
    if sample_rate is not None:
        exact = Fraction(validate.fraction(sample_rate=sample_rate))
    if batch_size is not None:
        wanted = Fraction(validate.positive(batch_size=batch_size))
        if wanted > size:
            raise ArgumentError(f"batch_size={batch_size!r}: must be at most dataset_size={size}")
        # Both may be given, as a stored config does; they must then mean the same coins.
        if sample_rate is not None and abs(wanted / size - exact) * WORDS >= 1:
            raise ArgumentError(
                f"sample_rate={sample_rate!r}: contradicts batch_size={batch_size!r} of {size} examples; give one"
            )
        exact = wanted / size if sample_rate is None else exact
    threshold = math.floor(exact * WORDS)
    if threshold == 0:
        raise ArgumentError(f"sample_rate={float(exact)!r}: must be at least 2^-32, below which no coin can land")
    return float(exact * size if batch_size is None else batch_size), threshold


def likely(size: int, mean: float) -> int:
    """Return a size that a batch of `size` independent coins, `mean` heads in all, exceeds with probability < 1e-30.

    Bernstein: Pr[heads >= mean + t] <= exp(-t^2 / (2 mean + 2 t / 3)).
    """
    third = -math.log(1e-30) / 3
    return min(size, math.ceil(mean + third + math.sqrt(third**2 + 6 * third * mean)))


@dataclass(frozen=True, init=False)
class PoissonSampler(LibrarySampler):
    """Each example takes part in each step with probability `sample_rate`, independently of everything else.

    Give `batch_size` or `sample_rate`. The coins are 32-bit words, so the rate is rounded **down** to a multiple of
    2^-32, and that rounded rate is both the true probability and the one accounted.

    Parameters
    ----------
    dataset_size : int
        Number of examples. Treated as public.
    batch_size : float, optional
        Expected batch size, the fixed denominator of averages; kept as given. By default sample_rate * dataset_size.
    sample_rate : float, optional
        0 < sample_rate <= 1; by default batch_size / dataset_size. As an attribute: the rounded rate.

    Notes
    -----
    Guarantee: example i is in step t if and only if word(t, i) < sample_rate * 2^32, whatever the order or backend.
    Batches may be empty and may be large; cutting a large one off would void the analysis.
    """

    dataset_size: int
    batch_size: float
    sample_rate: float
    kind = "poisson"
    note = "each example enters each step independently with the given probability; batches are never cut off"
    stated = ("sample_rate",)
    adjacency = Adjacency.ADD_REMOVE
    max_batch_size = None  # every example may toss heads at once, and cutting a batch off would void the analysis

    def __init__(self, *, dataset_size: int, batch_size: float | None = None, sample_rate: float | None = None) -> None:
        size = validate.integer(dataset_size=dataset_size, minimum=1)
        expected, threshold = coin(size, batch_size, sample_rate)
        object.__setattr__(self, "dataset_size", size)
        object.__setattr__(self, "batch_size", expected)
        object.__setattr__(self, "sample_rate", threshold / WORDS)

    @property
    def likely_batch_size(self) -> int:
        """A size that a step exceeds with a probability below 1e-30."""
        return likely(self.dataset_size, self.dataset_size * self.sample_rate)

    def _batch(self, key: bytes, step: int) -> Indices:
        threshold = round(self.sample_rate * WORDS)
        return draw.coins(draw.row_words(key, step), threshold, 0, self.dataset_size)

    def event(self, noise_multiplier: float, steps: int) -> PoissonSampledGaussian:
        """Return the event of `steps` steps; the sensitivity of the sum under add-remove is C itself."""
        return PoissonSampledGaussian(self.sample_rate, noise_multiplier, steps)


OVERFLOW: Final = 1e-6
"""The default maximum is passed, and the batch cut, with a smaller probability than this a step."""


def smallest_maximum(size: int, sample_rate: float, overflow: float = OVERFLOW) -> int:
    """Return the smallest B with Pr[Bin(size, sample_rate) > B] < overflow, at least 1.

    The tail falls in B and is 0 at B = size.
    """

    def enough(most: int) -> bool:
        return phases.more_than(most, size, sample_rate) < overflow

    return 1 + bisect_left(range(1, size), True, key=enough)


@dataclass(frozen=True, init=False)
class TruncatedPoissonSampler(LibrarySampler):
    """Poisson coins, and a uniformly random subset of `max_batch_size` if more examples are drawn in a step.

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


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampler(WholeBatches):
    """Each step takes exactly `batch_size` examples, drawn without replacement, independently of other steps.

    Parameters
    ----------
    dataset_size, batch_size : int
        1 <= batch_size <= dataset_size. Both public.

    Notes
    -----
    Guarantee: all subsets of that size are equally likely (see `dpcore.sampling.draw`).
    """

    kind = "fixed size"
    note = "each step takes a fresh uniform subset without replacement"
    adjacency = Adjacency.REPLACE_ONE  # the number of examples is public and does not change

    def _batch(self, key: bytes, step: int) -> Indices:
        return draw.subset(draw.row_words(key, step), self.dataset_size, self.batch_size)

    def event(self, noise_multiplier: float, steps: int) -> FixedSizeSampledGaussian:
        """Return the event of `steps` steps.

        Replacing an example changes the sum by up to 2C, so the event's multiplier, relative to that, is half of the
        given one.
        """
        return FixedSizeSampledGaussian(
            self.dataset_size, self.batch_size, validate.non_negative(noise_multiplier=noise_multiplier) / 2.0, steps
        )


# Random allocation, or balls in bins: in each epoch every example enters one batch, drawn in secret.
#
# Batches differ a little in size, as under Poisson sampling. Examples are drawn independently of each other, so there
# is amplification (`dpcore.accounting.pld.allocation`); shuffling into batches of one size would have none.
#
# Branches. A run that goes back to a checkpoint keeps the batches of each epoch: fresh ones in the middle of an epoch
# could use an example twice. The repeated releases get no amplification, since earlier releases may have shown which
# batch the example is in: each epoch that an abandoned branch reaches into is charged as one Gaussian release.
# Whatever was learned before, the example is in one of the batches, and no mixture over them is worse than the worst.


@dataclass(frozen=True, kw_only=True)
class RandomAllocationSampler(Blocks, LibrarySampler):
    """Every epoch has dataset_size / batch_size steps (rounded up), and each example enters one of them at random.

    Parameters
    ----------
    dataset_size : int
        Number of examples. Treated as public.
    batch_size : float
        The expected one, up to the rounding of the number of steps; the fixed denominator of averages.

    Notes
    -----
    Guarantee: in epoch e, example i enters the batch ``word(e, a n + i) mod steps_per_epoch``, with n the size of the
    data set and a = 0, 1, ... the first for which the word is below the largest multiple of that number: every batch
    has the same probability, exactly, whatever the others do.
    """

    dataset_size: int
    batch_size: float
    kind = "random allocation"
    note = (
        "in every epoch each example enters one of its batches, each with the same probability and independently of "
        "all others; batches are never cut off"
    )
    stated = ("steps_per_epoch",)
    adjacency = Adjacency.ADD_REMOVE
    keeps_order = True  # the batches of an epoch are one arrangement
    max_batch_size = None  # all examples may enter one batch

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_batch_size()
        if self.steps_per_epoch > 1 << 24:
            raise ArgumentError(
                f"batch_size={self.batch_size!r}: an epoch must have at most 2^24 steps; take larger batches"
            )

    @property
    def likely_batch_size(self) -> int:
        """A size that a step exceeds with a probability below 1e-30, by Bernstein as for Poisson sampling."""
        return likely(self.dataset_size, self.dataset_size / self.steps_per_epoch)

    def _batch(self, key: bytes, step: int) -> Indices:
        epoch, place = divmod(step, self.steps_per_epoch)
        members, ends = _epoch(key, epoch, self.dataset_size, self.steps_per_epoch)
        return members[ends[place] : ends[place + 1]]

    def event(self, noise_multiplier: float, steps: int) -> RandomAllocationGaussian:
        """Return the event of `steps` steps: a last epoch counts as a whole one, wherever it ends."""
        epochs = -(-validate.integer(steps=steps, minimum=0) // self.steps_per_epoch)
        return RandomAllocationGaussian(self.steps_per_epoch, noise_multiplier, epochs)


@lru_cache(maxsize=4)
def _epoch(key: bytes, epoch: int, size: int, batches: int) -> tuple[Indices, npt.NDArray[np.int64]]:
    """Return the examples batch by batch, sorted in each, and the bounds of the batches.

    Cached as `draw.permutation` is, and as secret.
    """
    words, limit = draw.row_words(key, epoch), WORDS // batches * batches
    chosen, missing, attempt = np.empty(size, np.int64), np.arange(size), 0
    while len(missing):
        drawn = words(attempt * size, size).astype(np.int64)[missing]
        kept = drawn < limit
        chosen[missing[kept]] = drawn[kept] % batches
        missing, attempt = missing[~kept], attempt + 1
    members = np.argsort(chosen, kind="stable").astype(np.int64)
    members.flags.writeable = False
    ends = np.concatenate([[0], np.cumsum(np.bincount(chosen, minlength=batches))])
    return members, ends
