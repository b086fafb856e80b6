"""A step on made-up examples: what it takes of memory and time, tensor by tensor, without a look at the data.

Nothing is drawn, accounted for or released, and model and loss are left as they were. Noise and update are measured on
a mechanism of their own, with copies of the parameters and keys that are thrown away.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dpcore.errors import ArgumentError
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.spec.free_memory import words
from dpcore.spec.keys import RunKeys
from dpcore.spec.ops import Backend
from dpcore.stages.clipping.blocks import Block, Chunked, Embedding, Linear, Rows, Tied, combined, scaled
from dpcore.stages.queries import Point
from dpcore.torch.data.batches import Tree, trial_batch
from dpcore.torch.engine import Engine
from dpcore.torch.memory import Footprint, Limit, arrays_of, microbatch_size

# Steps whose points are counted beside those where a window has just filled up: of one of a million, not all.
_FIRST_STEPS = 64
_ENOUGH = 512
"""Rows of a product with a head's weight from which on more of them make it little faster."""


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

    @cached_property
    def footprint(self) -> Footprint:
        """What finding gradients takes, by the proved graph or, one by one, by the sizes of rows."""
        gradient = self.engine.gradient
        if gradient.way == "pairs":
            return gradient.proved.prove(self.example).footprint
        return Footprint.of_rows(gradient.parameters())

    def check_grid(self) -> None:
        """Refuse noise whose grid is too coarse for the model's gradients: before a ledger pays for a step."""
        self.engine.mechanism.check_grid(self.footprint.blocks)

    def fit(self, limit: Limit) -> None:
        """Plan micro-batches that fit a limit."""
        # Captured passes keep what they take, at each point, for full micro-batches and for what is left over; and
        # micro-batches of other sizes run beside them.
        shares = 1 if self.engine.gradient.repeated is None else 1 + 2 * len(self.points)
        most = limit.bytes // shares
        self.engine.plan_microbatches(self._leaner(most, self._fitting(most)))
        self.engine.limit = limit

    def _fitting(self, most: int) -> int:
        return microbatch_size(most, self.needed, self.likely_examples)

    def _leaner(self, most: int, size: int) -> int:
        """Take heads without their logits where these leave room for few examples; return the micro-batch's size.

        It makes them twice more, and saves passes over them. So it pays where products of fewer rows would be slow, or
        where one example's logits do not fit.
        """
        gradient = self.engine.gradient
        if gradient.way != "pairs" or gradient.repeated is not None or not gradient.free:
            return size
        before, rows = self.needed(size), size * gradient.proved.prove(self.example).rows
        if before <= most and (size == self.likely_examples or rows >= _ENOUGH):
            return size
        self._take(lean=True)
        found = self._fitting(most)
        if not any(isinstance(block, Chunked) for block in self.footprint.blocks) or self.needed(size) >= before:
            self._take(lean=False)
            return size
        gradient.reasons["logits"] = f"they leave room for a micro-batch of {size} examples in {words(most)}"
        return found

    def _take(self, lean: bool) -> None:
        self.engine.gradient.proved.lean = lean
        self.engine.gradient.proved.forget()
        del self.footprint

    def needed(self, examples: int) -> int:
        """Return the bytes that a sum over so many examples takes."""
        working, scales = self.engine.working, self.engine.mechanism.vectors.scales
        parameters = sum(tensor.nbytes for tensor in working.tensors())
        return self.footprint.needed(
            examples, len(self.points), working.dtype, parameters, several=self.several, scaled=scales is not None
        )

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


def fullest(plan: Plan) -> tuple[Point, ...]:
    """Return the points of a step that has most. Windows fill up at first; later the number changes little."""
    query: Any = plan.method.query
    looked_at = {*range(_FIRST_STEPS), *range(query.lags, query.lags + 8), plan.steps - 1}
    return max((query.points(step) for step in sorted(looked_at) if step < plan.steps), key=len)


_ROUNDS = 3
_FEW = 8  # rows an example, up to which every backend takes norms by inner products


@dataclass(frozen=True)
class Layer:
    """One trained tensor, or what is not of one tensor alone."""

    name: str
    parameters: int
    operations: tuple[str, ...] = ()  # those of torch that took it together with examples
    rule: str = ""  # how its norms and its sum are taken
    rows: int = 0  # T of each example at one point, of which pairs are made; 0 without pairs
    points: int = 0  # where gradients are taken in a step
    bytes: int = 0  # held for each example; inputs that several tensors share count with each of them
    share: float = 0.0  # of the time of a step


@dataclass(frozen=True)
class Explanation:
    """How a run takes its steps; ``print`` shows it. It costs no privacy: no example was looked at."""

    way: str  # how gradients are found: "pairs" or "one-by-one"
    reasons: dict[str, str]  # why faster ways were not taken
    microbatch_size: int
    examples: float  # of a step, in expectation
    peak_bytes: int  # of the sum over one micro-batch, beside parameters and the run's vectors
    limit_bytes: int | None  # what the micro-batch was chosen for; None where it was given
    limit_source: str
    points: int  # where gradients are taken in a step that has most of them
    seconds: float  # of a step with that many examples
    layers: tuple[Layer, ...]  # trained tensors, "forward and backward", "noise and update", the frozen tensors

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, texts, lists and dicts."""
        return {**asdict(self), "layers": [{**asdict(e), "operations": list(e.operations)} for e in self.layers]}

    def __str__(self) -> str:
        why = "".join(f"\n  not {way!r}: {reason}" for way, reason in self.reasons.items())
        limit = self.limit_source if self.limit_bytes is None else f"{words(self.limit_bytes)}, {self.limit_source}"
        return "\n".join([
            f"gradients: {self.way!r}{why}",
            f"points of a step: {self.points}",
            f"micro-batch: {self.microbatch_size} examples, of about {self.examples:.0f} in a step",
            f"peak memory of its sum: {words(self.peak_bytes)} (limit: {limit})",
            f"time of a step: {self.seconds:.3g} s; the shares follow",
            "",
            *_table(self.layers),
            "",
            "Measured on made-up examples, at a step with most points: no data were looked at, it costs no privacy.",
        ])  # fmt: skip


def _table(layers: tuple[Layer, ...]) -> Iterator[str]:
    head = ("tensor", "parameters", "operations", "rule", "rows", "points", "for each example", "time")
    cells = [head, *(_cells(layer) for layer in layers)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
    texts = {0, 2, 3}
    for row in cells:
        padded = (c.ljust(w) if k in texts else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(padded).rstrip()


def _cells(layer: Layer) -> tuple[str, ...]:
    numbers = (str(number) if number else "" for number in (layer.rows, layer.points))
    size, share = words(layer.bytes) if layer.bytes else "", "" if layer.rule == "frozen" else f"{layer.share:.1%}"
    count = f"{layer.parameters:,}" if layer.parameters else ""
    return (layer.name, count, ", ".join(layer.operations), layer.rule, *numbers, size, share)


def explain(rehearsal: Rehearsal) -> Explanation:
    """Measure a run; nothing is drawn or released, and the run goes on as if it had not been measured."""
    engine = rehearsal.engine
    gradient, working = engine.gradient, engine.working
    device = working.parameters[0].device
    if engine.mechanism.peers.shards:
        raise ArgumentError("private.explain() of a model of fully_shard: must be asked of a run of the whole model")
    named = gradient.model.named_parameters()
    frozen = [parameter.numel() for name, parameter in named if name not in gradient.names]
    size = min(engine.microbatch_size, rehearsal.likely_examples)
    parts = rehearsal.expected_examples / size
    held = gradient.held()
    try:
        forward = _seconds(lambda: rehearsal.blocks(size), device) * parts
        blocks = rehearsal.blocks(size)
        blocks = [block.units(size) for block in blocks] if rehearsal.several else blocks
        layers = _layers(rehearsal, blocks, size, parts)
        del blocks
        mine, copies = engine.mechanism, [working.to_array(tensor.clone()) for tensor in working.tensors()]
        # Of the run's plan, and nothing else of it: other keys, other vectors, no ledger.
        other = Mechanism(rehearsal.plan, mine.layout, copies, backend=mine.backend, keys=RunKeys.new(), rng=mine.rng)
        needs_public = rehearsal.plan.method.update.second_moment == "public"
        public = [copy.reshape(-1) * 0 for copy in copies] if needs_public else None
        rounds = min(_ROUNDS, rehearsal.plan.steps)
        update = _least(lambda: other.release(copies, public=public), device, rounds)
    finally:
        held.restore()
    total = forward + sum(spent for _, spent in layers) + update
    limit = engine.limit
    return Explanation(
        way=gradient.way,
        reasons=dict(gradient.reasons),
        microbatch_size=engine.microbatch_size,
        examples=rehearsal.expected_examples,
        peak_bytes=rehearsal.needed(size),
        limit_bytes=None if limit is None else limit.bytes,
        limit_source="microbatch_size was given" if limit is None else limit.source,
        points=len(rehearsal.points),
        seconds=total,
        layers=(
            *(replace(layer, share=spent / total) for layer, spent in layers),
            Layer("forward and backward", 0, points=len(rehearsal.points), share=forward / total),
            Layer("noise and update", 0, share=update / total),
            *([Layer(f"{len(frozen)} frozen tensors", sum(frozen), rule="frozen")] if frozen else []),
        ),
    )


def _layers(rehearsal: Rehearsal, blocks: list[Block], examples: int, parts: float) -> list[tuple[Layer, float]]:
    """Return what is said of each trained tensor, with the seconds of its norms and its sum."""
    engine = rehearsal.engine
    backend, scales = engine.mechanism.backend, engine.mechanism.vectors.scales
    left: list[Any] = [None] * len(blocks)
    if scales is not None:
        blocks, left = scaled(blocks), scales
    layers, points = [], len(rehearsal.points)
    for place, (block, scale) in enumerate(zip(blocks, left, strict=True)):
        with backend.beside(engine.mechanism.vectors.totals[0]):
            spent = _seconds(_once(backend, block, scale), engine.working.parameters[0].device)
        layer = Layer(
            engine.gradient.names[place],
            math.prod(block.shape),
            engine.gradient.operations(place),
            rule_of(block),
            rows=_rows(block) * block.examples // (examples * points),
            points=points,
            bytes=sum(math.prod(a.shape) * a.itemsize for a in arrays_of(block)) // examples,
        )
        layers.append((layer, parts * spent))
    return layers


def _once(backend: Backend[Any], block: Block, scale: Any) -> Callable[[], None]:
    """Return a call that takes a block's norms, and its sum into scratch memory."""
    total = backend.from_numpy(np.zeros(math.prod(block.shape)))
    weights = backend.from_numpy(np.ones(block.examples))

    def once() -> None:
        block.norms(backend, scale)
        block.add_sum(backend, weights, total, scale)

    return once


def rule_of(block: Block) -> str:
    """Return in words how a block's norms and its sum are taken."""
    if isinstance(block, Rows):
        return "rows"
    if isinstance(block, Embedding):
        return "table of tokens"
    if isinstance(block, Tied):
        return "tied: table and pairs"
    if isinstance(block, Chunked):
        return "head without logits" if len({type(part) for part in block.parts}) == 1 else "tied: head without logits"
    if isinstance(block, Linear) and block.exact:
        return "pairs: float64"
    if isinstance(block, Linear) and (block.gram or _rows(block) <= _FEW):
        return "pairs: inner products"
    return "pairs: tiles"


def _rows(block: Block) -> int:
    parts = block.gradients if isinstance(block, Linear | Embedding) else ()
    if isinstance(block, Tied):
        parts = block.linear.gradients
    if isinstance(block, Chunked):
        parts = tuple(part.inputs for part in block.parts if hasattr(part, "inputs"))
    return sum(int(part.shape[1]) for part in parts)


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Return the least time of some calls, after a first one."""
    function()
    return _least(function, device, _ROUNDS)


def _least(function: Callable[[], Any], device: torch.device, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
