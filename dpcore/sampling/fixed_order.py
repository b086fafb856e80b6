"""A fixed order: the same batches, with the same boundaries, in every epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dpcore.sampling import draw
from dpcore.sampling.base import Indices
from dpcore.sampling.whole_batches import Epochs
from dpcore.spec import validate
from dpcore.stages.strategies import Strategy, sensitivity


@dataclass(frozen=True, kw_only=True)
class FixedOrderSampler(Epochs):
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

    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "shuffle", bool(self.shuffle))
        object.__setattr__(self, "drop_last", bool(self.drop_last))

    def patterns(self, steps: int) -> list[Indices]:
        """Return the steps at which the examples of each batch take part: j, j + steps_per_epoch, ... below `steps`.

        Returns
        -------
        list of (k,) int64
            One for each batch that occurs in steps 0 .. steps - 1; disjoint.
        """
        epoch, steps = self.steps_per_epoch, validate.integer(steps=steps, minimum=0)
        return [np.arange(first, steps, epoch, dtype=np.int64) for first in range(min(epoch, steps))]

    def check_strategy(self, strategy: Strategy, steps: int) -> None:
        """Every strategy is covered: the steps of an example are known before the run."""

    def moved(self, strategy: Strategy, steps: int, first: int = 0) -> float:
        """Return how far one example moves C times the sums, at the steps of its batch."""
        return sensitivity(strategy, self.patterns(steps), steps, first)

    def meetings(self, first: int, stop: int) -> int:
        """Return how often the most used example takes part in steps [first, stop)."""
        return max((int((steps >= first).sum()) for steps in self.patterns(stop)), default=0)

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
