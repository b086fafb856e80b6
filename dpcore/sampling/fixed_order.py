"""A fixed order: the same batches, with the same boundaries, in every epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dpcore.accounting import Adjacency, Gaussian
from dpcore.errors import ArgumentError
from dpcore.sampling import draw
from dpcore.sampling.base import Indices
from dpcore.spec import validate


@dataclass(frozen=True, kw_only=True)
class FixedOrderSampler:
    """Cycles through one partition of the data set; step t takes batch t mod steps_per_epoch.

    The order is shuffled once, before the run, and never again. The shuffle is for training only: the privacy analysis
    takes the batches as known to the adversary, so nothing is lost if they are published. batch_size = dataset_size is
    full batch.

    Parameters
    ----------
    dataset_size, batch_size : int
        1 <= batch_size <= dataset_size.
    shuffle : bool
        Whether the order is drawn from the sampling key (the row kept for it) or is that of the data set.
    drop_last : bool
        Whether the examples of a last, shorter batch are left out of the whole run, or form a batch of their own that
        keeps its place. Averages are over `batch_size` either way.
    """

    dataset_size: int
    batch_size: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset_size", validate.integer(dataset_size=self.dataset_size, minimum=1))
        object.__setattr__(self, "batch_size", validate.integer(batch_size=self.batch_size, minimum=1))
        object.__setattr__(self, "shuffle", bool(self.shuffle))
        object.__setattr__(self, "drop_last", bool(self.drop_last))
        if self.batch_size > self.dataset_size:
            raise ArgumentError(f"batch_size={self.batch_size!r}: must be at most dataset_size={self.dataset_size}")

    @property
    def max_batch_size(self) -> int:
        """The batch size."""
        return self.batch_size

    @property
    def keeps_order(self) -> bool:
        """True: every epoch repeats one order."""
        return True

    @property
    def adjacency(self) -> Adjacency:
        """Zero-out: removing an example would move the others to other batches."""
        return Adjacency.ZERO_OUT

    @property
    def expected_batch_size(self) -> float:
        """The batch size, also for a shorter last batch: one fixed denominator."""
        return float(self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches."""
        whole = self.dataset_size // self.batch_size
        return whole if self.drop_last else -(-self.dataset_size // self.batch_size)

    def participations(self, steps: int) -> int:
        """Return how often an example takes part in `steps` steps, at most (that of batch 0, which comes first)."""
        return -(-validate.integer(steps=steps, minimum=0) // self.steps_per_epoch)

    def patterns(self, steps: int) -> list[Indices]:
        """Return the steps at which the examples of each batch take part: j, j + steps_per_epoch, ... below `steps`.

        Returns
        -------
        list of (k,) int64
            One for each batch that occurs in steps 0 .. steps - 1; disjoint.
        """
        epoch, steps = self.steps_per_epoch, validate.integer(steps=steps, minimum=0)
        return [np.arange(first, steps, epoch, dtype=np.int64) for first in range(min(epoch, steps))]

    def indices(self, key: bytes, step: int, *, start: int = 0, stop: int | None = None) -> Indices:
        """Return the examples of a step, sorted, (m,) int64 with m = batch_size except in a shorter last batch.

        With `start` and `stop`, those of them in [start, stop) (a shard).
        """
        first = draw.check_step(step) % self.steps_per_epoch * self.batch_size
        last = min(first + self.batch_size, self.dataset_size)
        if self.shuffle:
            batch = np.sort(draw.permutation(key, self.dataset_size)[first:last])
        else:
            batch = np.arange(first, last, dtype=np.int64)
        return draw.cut(batch, self.dataset_size, start, stop)

    def event(self, noise_multiplier: float, steps: int) -> Gaussian:
        """Return the event of `steps` steps: Gaussian, with one release for each time an example takes part."""
        return Gaussian(noise_multiplier, self.participations(steps), Adjacency.ZERO_OUT)

    def describe(self) -> dict[str, Any]:
        """Return the public settings."""
        return {
            "sampler": "fixed order",
            "dataset_size": self.dataset_size,
            "expected_batch_size": self.batch_size,
            "steps_per_epoch": self.steps_per_epoch,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "adjacency": self.adjacency.value,
            "secret": False,
            "note": "the same batches in the same order in every epoch; no amplification by sampling is claimed",
        }
