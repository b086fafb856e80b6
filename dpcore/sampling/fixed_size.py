"""Sampling of a fixed size: a fresh uniform subset at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpcore.accounting import Adjacency, FixedSizeSampledGaussian
from dpcore.sampling import draw
from dpcore.sampling.base import Indices
from dpcore.sampling.whole_batches import WholeBatches
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

    @property
    def adjacency(self) -> Adjacency:
        """Replace-one: the number of examples is public and does not change."""
        return Adjacency.REPLACE_ONE

    def indices(self, key: bytes, step: int, *, start: int = 0, stop: int | None = None) -> Indices:
        """Return the examples of a step, (batch_size,) int64, sorted; those in [start, stop) for a shard."""
        batch = draw.subset(draw.row_words(key, draw.check_step(step)), self.dataset_size, self.batch_size)
        return draw.cut(batch, self.dataset_size, start, stop)

    def event(self, noise_multiplier: float, steps: int) -> FixedSizeSampledGaussian:
        """Return the event of `steps` steps.

        Replacing an example changes the sum by up to 2C, so the event's multiplier, relative to that, is half of the
        given one.
        """
        return FixedSizeSampledGaussian(
            self.dataset_size, self.batch_size, validate.non_negative(noise_multiplier=noise_multiplier) / 2.0, steps
        )

    def describe(self) -> dict[str, Any]:
        """Return the public settings."""
        return {
            "sampler": "fixed size",
            "dataset_size": self.dataset_size,
            "expected_batch_size": self.batch_size,
            "adjacency": self.adjacency.value,
            "secret": True,
            "note": "each step takes a fresh uniform subset without replacement",
        }
