"""A fixed order: the same batches, with the same boundaries, in every epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpcore.sampling import draw
from dpcore.sampling.base import Indices
from dpcore.sampling.library import Epochs, Patterns
from dpcore.spec import validate


@dataclass(frozen=True, kw_only=True)
class FixedOrderSampler(Patterns, Epochs):
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
    kind = "fixed order"
    note = "the same batches in the same order in every epoch; no amplification by sampling is claimed"
    stated = ("steps_per_epoch", "shuffle", "drop_last")

    def patterns(self, steps: int) -> list[Indices]:
        """Return the steps at which the examples of each batch take part: j, j + steps_per_epoch, ... below `steps`.

        Returns
        -------
        list of (k,) int64
            One for each batch that occurs in steps 0 .. steps - 1; disjoint.
        """
        epoch, steps = self.steps_per_epoch, validate.integer(steps=steps, minimum=0)
        return [np.arange(first, steps, epoch, dtype=np.int64) for first in range(min(epoch, steps))]

    def _batch(self, key: bytes, step: int) -> Indices:
        first = step % self.steps_per_epoch * self.batch_size
        last = min(first + self.batch_size, self.dataset_size)
        if self.shuffle:
            return np.sort(draw.permutation(key, self.dataset_size)[first:last])
        return np.arange(first, last, dtype=np.int64)
