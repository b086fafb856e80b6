"""The memory that a step's sum takes, counted while it is taken: tensors and NumPy's arrays."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

from dpcore.stages.clipping.blocks import as_block, joined, of_units
from dpcore.torch import PrivateRun
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


def peak_of_sum(run: PrivateRun, examples: int) -> int:
    """The peak bytes of a run's sum over so many made-up examples, of which its mechanism forgets all."""
    rehearsal, mechanism = run._rehearsal, run._engine.mechanism

    def whole() -> None:
        blocks = rehearsal.blocks(examples)
        if not rehearsal.several:
            mechanism.add(blocks)
            return
        for units in of_units(mechanism.backend, blocks, [1, examples - 1]):
            mechanism.add(units)
        # A unit larger than a micro-batch is carried on as rows.
        begun = [as_block(block.units(examples).rows()) for block in blocks]
        blocks = units = []
        blocks = rehearsal.blocks(examples)
        mechanism.add([joined((block.units(examples), row)) for block, row in zip(blocks, begun, strict=True)])

    try:
        with as_written():
            return peak_bytes(whole)
    finally:
        mechanism.discard()
