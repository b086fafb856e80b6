"""Per-example gradients of a model of fully_shard, of which all processes take some together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from dpcore.stages.clipping.blocks import Block
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.model.functional import Values
from dpcore.torch.model.gathering import Note
from dpcore.torch.model.made_up import trial_batch
from dpcore.torch.model.per_example import Loss, PerExampleGradient, Unfit
from dpcore.torch.model.probe import EXAMPLES
from dpcore.torch.model.sharded_values import ShardedValues

T = TypeVar("T")


class ShardedGradient(PerExampleGradient):
    """See `PerExampleGradient`. Each call runs the model once, since the layers of all processes are gathered for it.

    The blocks are of whole gradients, of this process's examples alone.
    """

    free = False

    def __init__(self, model: Any, loss: Loss, note: Note) -> None:
        self._note_of_messages = note
        super().__init__(model, loss)
        assert isinstance(self.values, ShardedValues)
        self.passed_over += self.values.held

    def _values(self) -> Values:
        return ShardedValues(self.model, self.names, self._note_of_messages)

    def _gradients(
        self, point: Sequence[Any], batch: Tree, seed: bytes, synthetic: bool, regular: Hashable = None
    ) -> list[Block]:
        if batches.size(batch) == 0:
            # The other processes have examples, and wait for this one's shards. What comes of the made-up ones is
            # dropped: the blocks that are returned are those of no example.
            self._by(self.way, point, trial_batch(self.example, EXAMPLES), seed, True)
        return super()._gradients(point, batch, seed, synthetic)  # never repeated: shards are gathered each time

    def guarded(self, function: Callable[[], T], seed: bytes, synthetic: bool) -> T:
        """See `PerExampleGradient.guarded`."""
        try:
            return super().guarded(function, seed, synthetic)
        except Unfit as refusal:
            told = "; a model of fully_shard is trained by gradients='pairs' alone"
            raise Unfit(f"{refusal}{told}") from refusal.__cause__
