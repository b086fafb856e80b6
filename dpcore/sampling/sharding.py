"""One process's share of every step's batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError
from dpcore.sampling.base import Indices, Sampler, check_sampler
from dpcore.spec import validate


@dataclass(frozen=True)
class Shard:
    """The share of process `rank` of `world_size` in the batches of a sampler; made by `shard`.

    Not a sampler: it has no event. What is accounted is the batch that all shares make together, so the clipped sums of
    all processes must be added up before **one** draw of noise is added.

    Attributes
    ----------
    sampler : Sampler
        Of the whole batches.
    rank, world_size : int
        0 <= rank < world_size.
    """

    sampler: Sampler
    rank: int
    world_size: int

    def indices(self, key: bytes, step: int) -> Indices:
        """Return this process's part of ``sampler.indices(key, step)``; in the order of ranks the parts join to it.

        `key` is the run's sampling key, the same in every process.
        """
        batch = self.sampler.indices(key, step)
        units = self.sampler.units(key, step)
        if units is None:
            first, last = self._range(batch.size)
        else:  # a unit's vectors are summed before they are clipped, and so stay together
            first, last = (int(units[:end].sum()) for end in self._range(units.size))
        return batch[first:last]

    def first(self, key: bytes, step: int) -> int:
        """Return the place of this process's first example in the whole batch."""
        units = self.sampler.units(key, step)
        if units is None:
            return self._range(self.sampler.indices(key, step).size)[0]
        return int(units[: self._range(units.size)[0]].sum())

    def units(self, key: bytes, step: int) -> npt.NDArray[np.int64] | None:
        """Return how many of `indices` belong to each unit, or None where every example is a unit."""
        units = self.sampler.units(key, step)
        return None if units is None else units[slice(*self._range(units.size))]

    def _range(self, count: int) -> tuple[int, int]:
        return self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size


def shard(sampler: Sampler, rank: int, world_size: int) -> Shard:
    """Return one process's share of every step's batch.

    All processes ask the same sampler with the same key, and each takes a slice: without a message between them the
    shares are disjoint, they join to the whole batch, and their sizes differ by at most one example (or user).

    Parameters
    ----------
    sampler : Sampler
        Any of `dpcore.sampling`.
    rank, world_size : int
        Which process, of how many: 0 <= rank < world_size.
    """
    check_sampler(sampler=sampler)
    world = validate.integer(world_size=world_size, minimum=1)
    own = validate.integer(rank=rank, minimum=0)
    if own >= world:
        raise ArgumentError(f"rank={rank}: must be less than world_size={world}")
    return Shard(sampler, own, world)
