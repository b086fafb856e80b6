"""A step's sum on made-up examples: what it takes of memory and time, without a look at the data.

Nothing is drawn, accounted for or released, and model and loss are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.stages.clipping.blocks import Block, as_block, combined, joined, of_units
from dpcore.stages.queries import Point
from dpcore.torch.data.batches import Tree, trial_batch
from dpcore.torch.engine import Engine
from dpcore.torch.gradients.capture import as_written
from dpcore.torch.model.memory import Limit, microbatch_size, peak_bytes

# Steps whose points are counted beside those where a window has just filled up: of one of a million, not all.
_FIRST_STEPS = 64


class Rehearsal:
    """Steps of a run on batches in the form of `example`, at its model's present parameters."""

    def __init__(self, engine: Engine, example: Tree) -> None:
        self.engine = engine
        self.example = example
        self.plan = engine.mechanism.plan
        self.points = fullest(self.plan)

    @property
    def likely_examples(self) -> int:
        """The most rows that a step is likely to have."""
        sampler = self.plan.sampler
        each = getattr(sampler, "max_examples_per_user", 1)
        return max(min(sampler.likely_batch_size * each, sampler.example_count), 1) * self.engine.views

    @property
    def expected_examples(self) -> float:
        """The rows of a step in expectation; of users it is not known, and the most are taken."""
        sampler = self.plan.sampler
        if sampler.unit_of_privacy != "example":
            return float(self.likely_examples)
        return float(sampler.expected_batch_size * self.engine.views)

    @property
    def several(self) -> bool:
        """Whether what is clipped is the sum of several rows: of a user's, or of an example's views."""
        return self.plan.sampler.unit_of_privacy != "example" or self.engine.views > 1

    def check_grid(self) -> None:
        """Refuse noise whose grid is too coarse for the model's gradients: before a ledger pays for a step."""
        engine = self.engine
        if engine.gradient.way == "pairs":
            blocks = engine.gradient.proved.prove(self.example).footprint.blocks
        else:
            blocks = [as_block(torch.empty(0, entry.size, device="meta")) for entry in engine.mechanism.layout.entries]
        engine.mechanism.check_grid(blocks)

    def fit(self, limit: Limit) -> None:
        """Plan micro-batches that fit a limit."""
        needed = self.needed() if self.engine.gradient.way == "pairs" else self._measured()
        # Captured passes keep what they take, at each point, for full micro-batches and for what is left over; and
        # micro-batches of other sizes run beside them.
        shares = 1 if self.engine.gradient.repeated is None else 1 + 2 * len(self.points)
        self.engine.plan_microbatches(microbatch_size(limit.bytes // shares, needed, self.likely_examples))
        self.engine.limit = limit

    def needed(self) -> Callable[[int], int]:
        """Return what gives the bytes of a sum over so many examples, by the proved graph."""
        footprint = self.engine.gradient.proved.prove(self.example).footprint
        working, scales = self.engine.working, self.engine.mechanism.vectors.scales
        parameters = sum(tensor.nbytes for tensor in working.tensors())
        return lambda examples: footprint.needed(
            examples, len(self.points), working.dtype, parameters, several=self.several, scaled=scales is not None
        )

    def _measured(self) -> Callable[[int], int]:
        # A first call imports and compiles: it is measured and not counted.
        _, one, two = (self.peak(examples, self.engine.mechanism) for examples in (1, 1, 2))
        return lambda examples: max(2 * one - two, 0) + examples * (two - one)

    def blocks(self, examples: int) -> list[Block]:
        """Return the gradients of so many examples: those of all points, combined."""
        engine, made = self.engine, trial_batch(self.example, examples)
        here = engine.gradient.parameters()

        def at(number: int) -> list[Block]:
            # A displaced point is a copy of the parameters.
            values = [value.clone() for value in here] if number else here
            return [block.map(engine.to_array) for block in engine.gradient(values, made, synthetic=True)]

        weights = [float(point.weight) for point in self.points]
        return combined(self.engine.mechanism.backend, weights, map(at, range(len(self.points))))

    def peak(self, examples: int, mechanism: Mechanism) -> int:
        """Return the peak bytes of the sum over so many examples; the mechanism forgets it, and all it had summed."""
        held = self.engine.gradient.held()

        def whole() -> None:
            blocks = self.blocks(examples)
            if not self.several:
                mechanism.add(blocks)
                mechanism.join()
                return
            for units in of_units(mechanism.backend, blocks, [1, examples - 1] if examples > 1 else [1]):
                mechanism.add(units)
            # A unit larger than a micro-batch is carried on as rows.
            begun = [as_block(block.units(examples).rows()) for block in blocks]
            blocks = units = []
            blocks = self.blocks(examples)
            mechanism.add([joined((block.units(examples), row)) for block, row in zip(blocks, begun, strict=True)])
            mechanism.join()

        try:
            with as_written():  # what compiled kernels take is not seen
                return peak_bytes(whole)
        finally:
            mechanism.discard()
            held.restore()


def fullest(plan: Plan) -> tuple[Point, ...]:
    """Return the points of a step that has most. Windows fill up at first; later the number changes little."""
    query: Any = plan.method.query
    looked_at = {*range(_FIRST_STEPS), *range(query.lags, query.lags + 8), plan.steps - 1}
    return max((query.points(step) for step in sorted(looked_at) if step < plan.steps), key=len)
