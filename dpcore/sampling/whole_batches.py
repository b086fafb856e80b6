"""The sizes and epochs of samplers with batches of one fixed size."""

from __future__ import annotations

from dataclasses import dataclass

from dpcore.accounting import Adjacency, Gaussian
from dpcore.errors import ArgumentError
from dpcore.sampling.base import BaseSampler
from dpcore.spec import validate


@dataclass(frozen=True, kw_only=True)
class WholeBatches(BaseSampler):
    """Batches of exactly `batch_size` of `dataset_size` examples, both public."""

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


class Epochs(WholeBatches):
    """An order of all examples, cut into batches; of an epoch's rest `drop_last` says whether it is one."""

    drop_last: bool

    @property
    def keeps_order(self) -> bool:
        """True: within an epoch the batches are one arrangement."""
        return True

    @property
    def adjacency(self) -> Adjacency:
        """Zero-out: removing an example would move the others to other batches."""
        return Adjacency.ZERO_OUT

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches of an epoch."""
        whole = self.dataset_size // self.batch_size
        return whole if self.drop_last else -(-self.dataset_size // self.batch_size)

    def participations(self, steps: int) -> int:
        """Return how often an example takes part in `steps` steps, at most: once in each epoch that they begin."""
        return -(-validate.integer(steps=steps, minimum=0) // self.steps_per_epoch)

    def event(self, noise_multiplier: float, steps: int) -> Gaussian:
        """Return the event of `steps` steps: Gaussian, with one release for each time an example takes part."""
        return Gaussian(noise_multiplier, self.participations(steps), Adjacency.ZERO_OUT)
