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

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpcore.accounting import Adjacency, RandomAllocationGaussian
from dpcore.errors import ArgumentError
from dpcore.sampling import draw
from dpcore.sampling.base import Indices
from dpcore.sampling.library import Blocks, LibrarySampler
from dpcore.sampling.poisson import WORDS, likely
from dpcore.spec import validate


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
