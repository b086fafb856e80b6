"""A fresh order every epoch, accounted without amplification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dpcore.sampling import draw
from dpcore.sampling.base import Indices
from dpcore.sampling.whole_batches import Epochs
from dpcore.spec import validate
from dpcore.stages.strategies import Strategy
from dpcore.stages.strategies.blocks import block_sensitivity


@dataclass(frozen=True, kw_only=True)
class ShuffledSampler(Epochs):
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

    drop_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "drop_last", bool(self.drop_last))

    def blocks(self, steps: int) -> list[Indices]:
        """Return the steps of each epoch below `steps`: an example takes part in at most one of each.

        Returns
        -------
        list of (k,) int64
            Ascending, disjoint.
        """
        epoch, steps = self.steps_per_epoch, validate.integer(steps=steps, minimum=0)
        return [np.arange(first, min(first + epoch, steps), dtype=np.int64) for first in range(0, steps, epoch)]

    def check_strategy(self, strategy: Strategy, steps: int) -> None:
        """Every strategy is covered, by a bound over all orders."""

    def moved(self, strategy: Strategy, steps: int, first: int = 0) -> float:
        """Return how far one example moves C times the sums, at most, at any one step of each epoch."""
        return block_sensitivity(strategy, self.blocks(steps), steps, first)

    def meetings(self, first: int, stop: int) -> int:
        """Return how many epochs reach into steps [first, stop)."""
        return sum(int(block[-1]) >= first for block in self.blocks(stop))

    def indices(self, key: bytes, step: int, *, start: int = 0, stop: int | None = None) -> Indices:
        """Return the examples of a step, sorted, (m,) int64 with m = batch_size except in a shorter last batch.

        With `start` and `stop`, those of them in [start, stop) (a shard).
        """
        epoch, place = divmod(draw.check_step(step), self.steps_per_epoch)
        first = place * self.batch_size
        batch = np.sort(draw.permutation(key, self.dataset_size, epoch)[first : first + self.batch_size])
        return draw.cut(batch, self.dataset_size, start, stop)

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
