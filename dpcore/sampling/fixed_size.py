"""Sampling of a fixed size: a fresh uniform subset at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpcore.accounting import Adjacency, FixedSizeSampledGaussian
from dpcore.errors import ArgumentError
from dpcore.sampling import draw
from dpcore.sampling.base import Indices
from dpcore.spec import validate


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampler:
    """Each step takes exactly `batch_size` examples, drawn without replacement, independently of other steps.

    Parameters
    ----------
    dataset_size, batch_size : int
        1 <= batch_size <= dataset_size. Both public.

    Notes
    -----
    Guarantee: all subsets of that size are equally likely (see `dpcore.sampling.draw`).
    """

    dataset_size: int
    batch_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset_size", validate.integer(dataset_size=self.dataset_size, minimum=1))
        object.__setattr__(self, "batch_size", validate.integer(batch_size=self.batch_size, minimum=1))
        if self.batch_size > self.dataset_size:
            raise ArgumentError(f"batch_size={self.batch_size!r}: must be at most dataset_size={self.dataset_size}")

    @property
    def max_batch_size(self) -> int:
        """The batch size."""
        return self.batch_size

    @property
    def keeps_order(self) -> bool:
        """False: every step draws anew."""
        return False

    @property
    def adjacency(self) -> Adjacency:
        """Replace-one: the number of examples is public and does not change."""
        return Adjacency.REPLACE_ONE

    @property
    def expected_batch_size(self) -> float:
        """The batch size."""
        return float(self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """dataset_size / batch_size, rounded up."""
        return -(-self.dataset_size // self.batch_size)

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
