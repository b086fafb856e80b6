"""A fresh order every epoch, accounted without amplification."""

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
class ShuffledSampler:
    """Every epoch goes through the data set once, in a fresh uniformly random order.

    What most training loops do. **No amplification is claimed**: the orders count as known to the adversary, and an
    example then takes part once in every epoch, at steps that no data decide. So an epoch costs what one release does,
    whatever the batch size, and nothing is lost if the orders are published.

    Parameters
    ----------
    dataset_size, batch_size : int
        1 <= batch_size <= dataset_size.
    drop_last : bool
        Whether the examples of an epoch's last, shorter batch are left out of that epoch (other ones in each), or form
        a batch of their own. Averages are over `batch_size` either way.

    Notes
    -----
    Guarantee: the order of epoch e is drawn by row e of the sampling stream. This sampler draws nothing by step, so no
    row is used twice; epochs end long before the row of the one shuffle of `FixedOrderSampler`.

    A branch of a run must keep the orders (`keeps_order`): a fresh one amid an epoch could meet an example that the
    epoch has met already.

    The last step of one epoch may be next to the first of the next: under correlated noise the sensitivity is that of
    any one step from each epoch (`blocks`), never that of a fixed order.
    """

    dataset_size: int
    batch_size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset_size", validate.integer(dataset_size=self.dataset_size, minimum=1))
        object.__setattr__(self, "batch_size", validate.integer(batch_size=self.batch_size, minimum=1))
        object.__setattr__(self, "drop_last", bool(self.drop_last))
        if self.batch_size > self.dataset_size:
            raise ArgumentError(f"batch_size={self.batch_size!r}: must be at most dataset_size={self.dataset_size}")

    @property
    def max_batch_size(self) -> int:
        """The batch size."""
        return self.batch_size

    @property
    def keeps_order(self) -> bool:
        """True: within an epoch the batches are one arrangement."""
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
        """The number of batches of an epoch."""
        whole = self.dataset_size // self.batch_size
        return whole if self.drop_last else -(-self.dataset_size // self.batch_size)

    def participations(self, steps: int) -> int:
        """Return how often an example takes part in `steps` steps, at most: once in each epoch that they begin."""
        return -(-validate.integer(steps=steps, minimum=0) // self.steps_per_epoch)

    def blocks(self, steps: int) -> list[Indices]:
        """Return the steps of each epoch below `steps`: an example takes part in at most one of each.

        Returns
        -------
        list of (k,) int64
            Ascending, disjoint.
        """
        epoch, steps = self.steps_per_epoch, validate.integer(steps=steps, minimum=0)
        return [np.arange(first, min(first + epoch, steps), dtype=np.int64) for first in range(0, steps, epoch)]

    def indices(self, key: bytes, step: int, *, start: int = 0, stop: int | None = None) -> Indices:
        """Return the examples of a step, sorted, (m,) int64 with m = batch_size except in a shorter last batch.

        With `start` and `stop`, those of them in [start, stop) (a shard).
        """
        epoch, place = divmod(draw.check_step(step), self.steps_per_epoch)
        first = place * self.batch_size
        batch = np.sort(draw.permutation(key, self.dataset_size, epoch)[first : first + self.batch_size])
        return draw.cut(batch, self.dataset_size, start, stop)

    def event(self, noise_multiplier: float, steps: int) -> Gaussian:
        """Return the event of `steps` steps: Gaussian, with one release for each epoch begun."""
        return Gaussian(noise_multiplier, self.participations(steps), Adjacency.ZERO_OUT)

    def describe(self) -> dict[str, Any]:
        """Return the public settings."""
        return {
            "sampler": "shuffled",
            "dataset_size": self.dataset_size,
            "expected_batch_size": self.batch_size,
            "steps_per_epoch": self.steps_per_epoch,
            "drop_last": self.drop_last,
            "adjacency": self.adjacency.value,
            "secret": False,
            "note": "a fresh order in every epoch, which the analysis takes as known: each example counts once an "
            "epoch; no amplification by sampling or shuffling is claimed",
        }
