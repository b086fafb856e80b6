"""A fresh order every epoch, accounted without amplification."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpcore.sampling import draw
from dpcore.sampling.base import Indices
from dpcore.sampling.library import Blocks, Epochs


@dataclass(frozen=True, kw_only=True)
class ShuffledSampler(Blocks, Epochs):
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
    kind = "shuffled"
    note = (
        "a fresh order in every epoch, which the analysis takes as known: each example counts once an epoch; no "
        "amplification by sampling or shuffling is claimed"
    )
    stated = ("steps_per_epoch", "drop_last")

    def _batch(self, key: bytes, step: int) -> Indices:
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size
        return np.sort(draw.permutation(key, self.dataset_size, epoch)[first : first + self.batch_size])
