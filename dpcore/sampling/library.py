"""What samplers of the library share: descriptions, and when an example takes part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from dpcore.accounting import Adjacency, Gaussian
from dpcore.errors import ArgumentError
from dpcore.sampling import draw
from dpcore.sampling.base import BaseSampler, Indices
from dpcore.spec import validate
from dpcore.stages.strategies import Strategy, sensitivity
from dpcore.stages.strategies.sensitivity import block_sensitivity


def _flag(**values: Any) -> bool:
    (value,) = values.values()
    return bool(value)


class LibrarySampler(validate.Checked, BaseSampler):
    """A sampler that draws a whole batch, and is described by its settings."""

    kind: ClassVar[str]
    """The name in descriptions, with spaces; with hyphens it is that of `dpcore.sampling.sampler`."""
    note: ClassVar[str]
    secret: ClassVar[bool] = True
    stated: ClassVar[tuple[str, ...]] = ()
    """What a description has beside sizes and adjacency."""

    dataset_size: int
    batch_size: float
    adjacency: Adjacency
    rules: ClassVar[validate.Rules] = {
        "dataset_size": partial(validate.integer, 1),
        "batch_size": validate.positive,
        "groups": partial(validate.integer, 1),
        "shuffle": _flag,
        "drop_last": _flag,
    }

    def indices(self, key: bytes, step: int) -> Indices:
        """Return the examples of a step, sorted, (m,) int64."""
        return self._batch(key, draw.check_step(step))

    def _batch(self, key: bytes, step: int) -> Indices:
        """Return all examples of a step, sorted."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return the public settings."""
        return {
            "sampler": self.kind,
            "dataset_size": self.dataset_size,
            "expected_batch_size": self.batch_size,
            **{name: getattr(self, name) for name in self.stated},
            "adjacency": self.adjacency.value,
            "secret": self.secret,
            "note": self.note,
        }

    def _check_batch_size(self) -> None:
        if self.batch_size > self.dataset_size:
            raise ArgumentError(f"batch_size={self.batch_size:.10g}: must be at most dataset_size={self.dataset_size}")


@dataclass(frozen=True, kw_only=True)
class WholeBatches(LibrarySampler):
    """Batches of exactly `batch_size` of `dataset_size` examples, both public."""

    dataset_size: int
    batch_size: int
    rules: ClassVar[validate.Rules] = {**LibrarySampler.rules, "batch_size": partial(validate.integer, 1)}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_batch_size()

    @property
    def max_batch_size(self) -> int:
        """The batch size."""
        return self.batch_size


class Patterns:
    """The steps of every example are known before the run: every strategy is covered."""

    def patterns(self, steps: int) -> list[Indices]:
        """Return the steps, ascending and below `steps`, at which one and the same example takes part, int64.

        Every pattern that some example shows, once. Examples that are never used show none.
        """
        raise NotImplementedError

    def check_strategy(self, strategy: Strategy, steps: int) -> None:
        """Every strategy is covered."""

    def moved(self, strategy: Strategy, steps: int, first: int = 0) -> float:
        """Return how far one example moves C times the sums, at the steps of its batch."""
        return sensitivity(strategy, self.patterns(steps), steps, first)

    def meetings(self, first: int, stop: int) -> int:
        """Return how often the most used example takes part in steps [first, stop)."""
        return max((int((steps >= first).sum()) for steps in self.patterns(stop)), default=0)


class Blocks:
    """An example takes part once in each epoch, nobody knows when: every strategy is covered, by a bound over all."""

    steps_per_epoch: Any

    def blocks(self, steps: int) -> list[Indices]:
        """Return the steps of each epoch below `steps`, (k,) int64: an example takes part in at most one of each."""
        epoch, steps = self.steps_per_epoch, validate.integer(steps=steps, minimum=0)
        return [np.arange(first, min(first + epoch, steps), dtype=np.int64) for first in range(0, steps, epoch)]

    def check_strategy(self, strategy: Strategy, steps: int) -> None:
        """Every strategy is covered."""

    def moved(self, strategy: Strategy, steps: int, first: int = 0) -> float:
        """Return how far one example moves C times the sums, at most, at any one step of each epoch."""
        return block_sensitivity(strategy, self.blocks(steps), steps, first)

    def meetings(self, first: int, stop: int) -> int:
        """Return how many epochs reach into steps [first, stop)."""
        epoch: int = self.steps_per_epoch
        return -(-stop // epoch) - first // epoch if first < stop else 0


class Epochs(WholeBatches):
    """An order of all examples, cut into batches. `drop_last` says whether the rest of an epoch is left out.

    The adjacency is zero-out: removing an example would move the others to other batches.
    """

    drop_last: bool
    adjacency = Adjacency.ZERO_OUT
    keeps_order = True  # within an epoch the batches are one arrangement
    secret = False

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
