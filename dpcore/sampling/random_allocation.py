"""Random allocation, or balls in bins: each epoch every example enters one of its batches, drawn in secret.

It is what people do who shuffle into batches and do not care that these differ a little in size: every example is used
once in every epoch. Unlike shuffling into batches of one size, it is amplified, for the examples are drawn
independently of each other (`dpcore.accounting.pld.allocation`).

Branches
--------
A run that goes back to a checkpoint keeps the batches of every epoch: other ones, in the middle of an epoch, could meet
an example again. What it releases once more, about batches that earlier releases told of, is charged without
amplification: one release for each epoch that an abandoned branch reaches into. Given everything else that was
released, which only says in which batch the example may be, a mixture over batches is not worse than the worst of
them, a Gaussian mechanism; so both compose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.accounting import Adjacency, RandomAllocationGaussian
from dpcore.errors import ArgumentError
from dpcore.sampling import draw
from dpcore.sampling.base import BaseSampler, Indices
from dpcore.sampling.poisson import WORDS
from dpcore.spec import validate
from dpcore.stages.strategies import Strategy
from dpcore.stages.strategies.blocks import block_sensitivity


@dataclass(frozen=True, kw_only=True)
class RandomAllocationSampler(BaseSampler):
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

    def __post_init__(self) -> None:
        size = validate.integer(dataset_size=self.dataset_size, minimum=1)
        batch_size = validate.positive(batch_size=self.batch_size)
        if batch_size > size:
            raise ArgumentError(f"batch_size={self.batch_size!r}: must be at most dataset_size={size}")
        object.__setattr__(self, "dataset_size", size)
        object.__setattr__(self, "batch_size", batch_size)
        if self.steps_per_epoch > 1 << 24:
            raise ArgumentError(
                f"batch_size={batch_size!r}: an epoch must have at most 2^24 steps; take larger batches"
            )

    @property
    def max_batch_size(self) -> None:
        """None: all examples may enter one batch."""
        return

    @property
    def likely_batch_size(self) -> int:
        """A size that a step exceeds with a probability below 1e-30, by Bernstein as for Poisson sampling."""
        third = -math.log(1e-30) / 3
        mean = self.dataset_size / self.steps_per_epoch
        return min(self.dataset_size, math.ceil(mean + third + math.sqrt(third**2 + 6 * third * mean)))

    @property
    def keeps_order(self) -> bool:
        """True: the batches of an epoch are one arrangement."""
        return True

    @property
    def adjacency(self) -> Adjacency:
        """Add-remove."""
        return Adjacency.ADD_REMOVE

    def indices(self, key: bytes, step: int, *, start: int = 0, stop: int | None = None) -> Indices:
        """Return the examples of a step, sorted; with `start` and `stop`, those of them in [start, stop) (a shard)."""
        epoch, place = divmod(draw.check_step(step), self.steps_per_epoch)
        members, ends = _epoch(key, epoch, self.dataset_size, self.steps_per_epoch)
        return draw.cut(members[ends[place] : ends[place + 1]], self.dataset_size, start, stop)

    def event(self, noise_multiplier: float, steps: int) -> RandomAllocationGaussian:
        """Return the event of `steps` steps: a last epoch counts as a whole one, wherever it ends."""
        epochs = -(-validate.integer(steps=steps, minimum=0) // self.steps_per_epoch)
        return RandomAllocationGaussian(self.steps_per_epoch, noise_multiplier, epochs)

    def meetings(self, first: int, stop: int) -> int:
        """Return how many epochs reach into steps [first, stop)."""
        epoch = self.steps_per_epoch
        return -(-stop // epoch) - first // epoch if first < stop else 0

    def check_strategy(self, strategy: Strategy, steps: int) -> None:
        """Every strategy is covered, without amplification: an example takes part once in each epoch."""

    def moved(self, strategy: Strategy, steps: int, first: int = 0) -> float:
        """Return how far one example moves C times the sums, at most, at any one step of each epoch."""
        epoch = self.steps_per_epoch
        blocks = [np.arange(begin, min(begin + epoch, steps), dtype=np.int64) for begin in range(0, steps, epoch)]
        return block_sensitivity(strategy, blocks, steps, first)

    def describe(self) -> dict[str, Any]:
        """Return the public settings."""
        return {
            "sampler": "random allocation",
            "dataset_size": self.dataset_size,
            "expected_batch_size": self.batch_size,
            "steps_per_epoch": self.steps_per_epoch,
            "adjacency": self.adjacency.value,
            "secret": True,
            "note": "in every epoch each example enters one of its batches, each with the same probability and "
            "independently of all others; batches are never cut off",
        }


@lru_cache(maxsize=4)
def _epoch(key: bytes, epoch: int, size: int, batches: int) -> tuple[Indices, npt.NDArray[np.int64]]:
    """Return the examples batch by batch, sorted in each, and where each batch begins and the last one ends.

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
