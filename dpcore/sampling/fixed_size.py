"""Sampling of a fixed size: a fresh uniform subset at every step."""

from __future__ import annotations

from dataclasses import dataclass

from dpcore.accounting import Adjacency, FixedSizeSampledGaussian
from dpcore.sampling import draw
from dpcore.sampling.base import Indices
from dpcore.sampling.library import WholeBatches
from dpcore.spec import validate


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
