"""The run's batches, drawn by the sampler that is accounted."""

from collections.abc import Iterator
from typing import NoReturn

from torch import Tensor

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.mechanism.mechanism import Mechanism
from dpcore.spec.keys import RunKeys
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.data.data import Data
from dpcore.torch.randomness import step_seed


class PrivateLoader:
    """Iterates over one epoch of the run's batches; the next iteration continues where this one ended.

    Step t is drawn only after step t - 1 was taken. A new iteration begins with the batch that was not stepped yet, if
    there is one, so looking at a batch is harmless. Only the draw of a step returns its data read ahead.
    """

    def __init__(self, data: Data, mechanism: Mechanism) -> None:
        self.data = data
        self._mechanism = mechanism
        # The last drawn batch's step and keys, which a release or a loaded state makes outdated, and its tensors.
        self._pending: tuple[int, RunKeys, tuple[Tensor, ...]] | None = None

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
        """Refuse to be pickled, since the loader has the run's keys."""
        raise PrivacyError("a private loader is not pickled or copied: save private.optimizer.state_dict() instead")

    @property
    def in_first_process(self) -> bool:
        """Whether this is the process that logs, and that has the ledger."""
        return self._mechanism.peers.rank == 0

    def consume(self, batch: Tree) -> Tree:
        """Return the batch, checked to be the one that was drawn.

        It has as many examples, and at least one tensor in the memory of the drawn batch: an earlier batch, kept and
        stepped once more, has none there, nor has that of another run.

        Notes
        -----
        A ledger adds up steps as if each drew its own batch. Two releases on one batch at noise s are one release at
        noise s / sqrt(2), with chi-square divergence q^2 (exp(2 / s^2) - 1). Two batches drawn independently give
        2 q^2 (exp(1 / s^2) - 1) + O(q^4), which is less.
        """
        pending = self._pending
        if pending is None or pending[0] != self._mechanism.step or pending[1] is not self._mechanism.keys:
            raise PrivacyError(
                "no drawn batch is waiting for a step: take each batch from private.loader, and step it exactly once"
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
                "the batch has none of the drawn tensors: step the loader's last batch, never a batch "
                "that was kept; change values in the data set, in collate_fn, in the model or in place, or pass on at "
                "least one tensor as it was drawn"
            )
        return batch


def steps_left(mechanism: Mechanism) -> range:
    """Return the steps from the present one to the end of the epoch or of the plan, whichever comes first.

    Raises `PrivacyError` if the plan's steps have been taken.
    """
    start, planned = mechanism.step, mechanism.plan.steps
    if start >= planned:
        raise PrivacyError(
            f"the plan's {start} steps have been taken: further ones are not covered by the guarantee; plan more "
            "epochs from the start"
        )
    epoch = mechanism.plan.sampler.steps_per_epoch
    return range(start, min((start // epoch + 1) * epoch, planned))
