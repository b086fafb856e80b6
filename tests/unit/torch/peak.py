"""The memory that a step's sum takes, counted while it is taken: tensors and NumPy's arrays."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

from dpcore.stages.clipping.blocks import Block, as_block, combined, joined, of_units
from dpcore.torch import PrivateRun
from dpcore.torch.data.batches import trial_batch
from dpcore.torch.gradients.capture import as_written
from dpcore.torch.memory import Peak


class Both(Peak):
    """Counts what `tracemalloc` sees of arrays, too."""

    def __init__(self) -> None:
        super().__init__()
        self._before = tracemalloc.get_traced_memory()[0]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look()
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.look()
        return result

    def look(self) -> None:
        """Count the most that arrays took since the last look, while the tensors stayed the same."""
        self.peak = max(self.peak, self._now + tracemalloc.get_traced_memory()[1] - self._before)
        tracemalloc.reset_peak()

    def _freed(self, number: int, size: int) -> None:
        self.look()
        super()._freed(number, size)


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes that tensors and arrays made by a call take at one time."""
    gc.collect(1)  # so that the collector runs at the same places of the call every time
    tracemalloc.start()
    try:
        with Both() as count:
            function()
            count.look()
    finally:
        tracemalloc.stop()
    return count.peak


def blocks_of(run: PrivateRun, examples: int) -> list[Block]:
    """The gradients of so many made-up examples: those of all points, combined."""
    rehearsal, engine = run._rehearsal, run._engine
    made, here = trial_batch(rehearsal.example, examples), engine.gradient.parameters()

    def at(number: int) -> list[Block]:
        # A displaced point is a copy of the parameters.
        values = [value.clone() for value in here] if number else here
        return [block.map(engine.to_array) for block in engine.gradient(values, made, synthetic=True)]

    weights = [float(point.weight) for point in rehearsal.points]
    return combined(engine.mechanism.backend, weights, map(at, range(len(weights))))


def peak_of_sum(run: PrivateRun, examples: int) -> int:
    """The peak bytes of a run's sum over so many made-up examples, of which its mechanism forgets all."""
    mechanism = run._engine.mechanism

    def whole() -> None:
        blocks = blocks_of(run, examples)
        if not run._rehearsal.several:
            mechanism.add(blocks)
            return
        for units in of_units(blocks, [1, examples - 1]):
            mechanism.add(units)
        # A unit larger than a micro-batch is carried on as rows.
        begun = [as_block(block.units(examples).rows()) for block in blocks]
        blocks = units = []
        blocks = blocks_of(run, examples)
        mechanism.add([joined((block.units(examples), row)) for block, row in zip(blocks, begun, strict=True)])

    try:
        with as_written():
            return peak_bytes(whole)
    finally:
        mechanism.discard()
