"""The run's batches, drawn by the sampler that is accounted; and its draws as indices, for a loader that the host owns.

The host's loader reads and joins; which examples a step takes stays the run's. Each example is read with its place in
the data, the places stay beside the batch, and a step compares them with its own draw: a batch that the host split,
joined, shuffled, repeated or took from elsewhere is refused. What the host makes of the values is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.mechanism.mechanism import Mechanism
from dpcore.spec.keys import RunKeys
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.data.data import Data, joined
from dpcore.torch.randomness import step_seed


class PrivateLoader:
    """Iterates over one epoch of the run's batches; the next iteration goes on where this one ended.

    Step t is drawn only after step t - 1 was taken. A new iteration begins with the batch that was not stepped yet, if
    there is one, so looking at a batch is harmless. What is read ahead is handed out by the draw of its step only.
    """

    def __init__(self, data: Data, mechanism: Mechanism) -> None:
        self.data = data
        self._mechanism = mechanism
        # Of the batch drawn last: its step and keys, which a release or a loaded state leave behind, and its tensors.
        self._pending: tuple[int, RunKeys, tuple[Tensor, ...]] | None = None
        self.sampler = PrivateSampler(data, mechanism)

    def __len__(self) -> int:
        """Steps of one epoch."""
        return self._mechanism.plan.sampler.steps_per_epoch

    def __iter__(self) -> Iterator[Tree]:
        """Yield batches on the model's device, to the end of the epoch or of the plan, whichever comes first."""
        self._pending = None
        for step in steps_left(self._mechanism):
            if self._mechanism.step != step:
                raise PrivacyError(
                    f"step {step - 1} drew a batch that was not stepped, or others were stepped meanwhile: call "
                    "private.step(batch) once for every batch drawn, in order, since skipping some changes the sampling"
                )
            indices = self._mechanism.draw()
            for later in range(step + 1, step + 1 + self.data.workers):  # as far as they are paid for
                ahead = self._mechanism.ahead(later)
                if ahead is None:
                    break
                self.data.read_ahead(ahead, self._seed(later))
            batch = self.data.batch(indices, self._seed(step))
            self._pending = step, self._mechanism.keys, tuple(batches.leaves(batch))
            yield batch

    def _seed(self, step: int) -> bytes:
        # No two processes' readings draw the same.
        return step_seed(self._mechanism.keys, "augmentation", step, self._mechanism.peers.rank)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: what draws the batches holds the run's keys."""
        raise PrivacyError("a private loader is not pickled or copied: save private.optimizer.state_dict() instead")

    @property
    def in_first_process(self) -> bool:
        """Whether this is the process that logs, and that has the ledger."""
        return self._mechanism.peers.rank == 0

    def consume(self, batch: Tree) -> Tree:
        """Return the batch, checked to be the one that was drawn.

        One of a host's loader has its places. One of this loader has as many examples, and at least one tensor in the
        memory of what was drawn: an earlier batch, kept and stepped once more, has none there.
        """
        if isinstance(batch, DrawnBatch):
            return self.sampler.take(batch)
        pending = self._pending
        if pending is None or pending[0] != self._mechanism.step or pending[1] is not self._mechanism.keys:
            raise PrivacyError(
                "no drawn batch is waiting for a step: take each batch from private.loader, or what "
                "private.sampler.collate makes, and step it exactly once"
            )
        try:
            count = batches.size(batch)
        except ArgumentError as cause:
            raise PrivacyError(
                "the batch is not the one that was drawn: its tensors disagree about the number of examples"
            ) from cause
        if count != batches.size(pending[2]):
            raise PrivacyError(
                "the batch has another number of examples than the one that was drawn: step it whole, exactly as the "
                "loader gave it (memory is limited by max_memory or microbatch_size, not by splitting batches)"
            )
        if count and not batches.memory(batch) & batches.memory(pending[2]):
            raise PrivacyError(
                "the batch holds none of the tensors that were drawn: step what the loader gave last, never a batch "
                "that was kept; change values in the data set, in collate_fn, in the model or in place, or pass on at "
                "least one tensor as it was drawn"
            )
        return batch


class DrawnBatch(NamedTuple):
    """A batch and the places of its examples in the data, in order: both are secret, where sampling is."""

    batch: Tree
    places: Any  # a tensor of integers, unless the host has changed it


class Numbered(Dataset[tuple[int, Any]]):
    """The data, read example by example, each with its place."""

    def __init__(self, length: int, read: Callable[[Sequence[int]], list[Any]]) -> None:
        self._length, self._read = length, read

    def __len__(self) -> int:
        """Number of examples."""
        return self._length

    def __getitem__(self, place: int) -> tuple[int, Any]:
        """Return a place and its example."""
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[int]) -> list[tuple[int, Any]]:
        """Return some: what torch's loader calls."""
        return list(zip(places, self._read(places), strict=True)) if len(places) else []


class Joiner:
    """Joins numbered examples to a `DrawnBatch`; of none it makes tensors of 0 rows, as Poisson sampling needs."""

    def __init__(self, collate: Callable[[list[Any]], Any], one: Tree) -> None:
        self._collate, self._one = collate, one

    def __call__(self, numbered: Sequence[tuple[int, Any]]) -> DrawnBatch:
        """Return the batch; refused like those of the run's own loader."""
        places = torch.tensor([place for place, _ in numbered], dtype=torch.int64)
        if not len(numbered):
            return DrawnBatch(batches.tree_map(lambda tensor: tensor[:0].clone(), self._one), places)
        batch = joined(self._collate, [example for _, example in numbered])
        batches.check_form(batches.named(batch), self._one)
        return DrawnBatch(batch, places)


class PrivateSampler(Sampler[list[int]]):
    """The places of each step's examples, for ``DataLoader(sampler.dataset, batch_sampler=sampler, collate_fn=...)``.

    One iteration is one epoch of the run, from its present step on. A loader may read ahead, as far as the run's ledger
    has paid for the steps.

    Attributes
    ----------
    dataset : Dataset
        The run's data with the place of each example.
    collate : callable
        For `collate_fn`: the run's own, with the places beside it. What `private.step` takes is what it returns.
    """

    def __init__(self, data: Data, mechanism: Mechanism) -> None:
        self._data, self._mechanism = data, mechanism

    @property
    def dataset(self) -> Numbered:  # noqa: D102 - documented with the class
        return Numbered(self._data.length, self._data.examples)

    @property
    def collate(self) -> Joiner:  # noqa: D102
        one = batches.tree_map(lambda tensor: tensor.cpu(), self._data.template())
        return Joiner(self._data.collate, one)

    def __len__(self) -> int:
        """Steps of one epoch."""
        return self._mechanism.plan.sampler.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the places of each step, to the end of the epoch or of the plan, whichever comes first. Secret."""
        for step in steps_left(self._mechanism):
            present = self._mechanism.step
            if step < present:
                raise PrivacyError(f"the sampler is at step {step} and the run at step {present}: iterate over it anew")
            indices = self._mechanism.draw() if step == present else self._mechanism.ahead(step)
            if indices is None:
                raise PrivacyError(
                    "the loader reads further ahead than the ledger has paid for: take fewer workers or a smaller "
                    "prefetch_factor, or num_workers=0"
                )
            yield self._data.places(indices)

    def take(self, drawn: DrawnBatch) -> Tree:
        """Return the batch of this step, on the model's device, if it holds the examples that the step draws."""
        steps_left(self._mechanism)
        wanted = self._data.places(self._mechanism.draw())
        if not isinstance(drawn.places, torch.Tensor) or drawn.places.tolist() != wanted:
            raise PrivacyError(
                "the batch holds other examples than this step draws, or in another order: step each batch of the "
                "loader once, whole and in order, and let nothing shard, split or join them"
            )
        if batches.size(batches.tree_map(lambda tensor: tensor, drawn.batch)) != len(wanted):
            raise PrivacyError("the batch has another number of examples than places: pass on what collate made")
        return batches.tree_map(lambda tensor: tensor.to(self._data.device), drawn.batch)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: what draws the batches holds the run's keys."""
        raise PrivacyError("a private sampler is not pickled or copied; its dataset and its collate may be")


def steps_left(mechanism: Mechanism) -> range:
    """Return the steps from the present one to the end of the epoch or of the plan, whichever comes first.

    Raises `PrivacyError` where the plan's steps have been taken.
    """
    start, planned = mechanism.step, mechanism.plan.steps
    if start >= planned:
        raise PrivacyError(
            f"the plan's {start} steps have been taken: further ones are not covered by the guarantee; plan more "
            "epochs from the start"
        )
    epoch = mechanism.plan.sampler.steps_per_epoch
    return range(start, min((start // epoch + 1) * epoch, planned))
