"""The memory of a step, tensor by tensor: it follows from sizes, without looking at the data."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import torch

from dpcore.errors import ArgumentError
from dpcore.plan.plan import Plan
from dpcore.spec.free_memory import words
from dpcore.spec.ops import Backend
from dpcore.stages.clipping.blocks import Block, Chunked, Embedding, Linear, Rows, Tied, joined, scaled
from dpcore.stages.queries import Point
from dpcore.torch.data.batches import Tree
from dpcore.torch.engine import Engine
from dpcore.torch.memory import Footprint, Limit, arrays_of, microbatch_size, whole_registers
from dpcore.torch.model import precision

# The first steps whose points are counted, in addition to those at which a window has just filled up.
_FIRST_STEPS = 64
_ENOUGH = 512
"""Rows of a product with a head's weight from which on more of them make it little faster."""


class Rehearsal:
    """The sizes of a run's steps, on batches in the form of `example`."""

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
        """The rows of a step in expectation."""
        sampler = self.plan.sampler
        return sampler.expected_batch_size * (sampler.example_count / sampler.dataset_size) * self.engine.views

    @property
    def usual_examples(self) -> int:
        """The number of rows that every micro-batch is filled up to if memory does not limit it.

        If examples are drawn independently it is the mean batch plus two standard deviations, which a step seldom
        exceeds. Batches of users vary more, so a quarter of the mean is taken (at least 16): less is filled up in vain,
        and products are still large enough to be fast.
        """
        processes, views = self.engine.mechanism.peers.world_size, self.engine.views
        mean, most = self.expected_examples / processes, -(-self.likely_examples // processes)
        by_users = self.plan.sampler.unit_of_privacy != "example"
        usual = math.ceil(max(mean / 4, 16.0) if by_users else mean + 2 * math.sqrt(mean * views))
        return min(whole_registers(usual), most)

    @property
    def several(self) -> bool:
        """Whether the clipped vector is the sum of several rows: of a user's, or of an example's views."""
        return self.plan.sampler.unit_of_privacy != "example" or self.engine.views > 1

    @cached_property
    def footprint(self) -> Footprint:
        """The memory of finding gradients, by the proved graph or, one by one, by the sizes of rows."""
        gradient = self.engine.gradient
        if gradient.way == "pairs":
            return gradient.proved.prove(self.example).footprint
        return Footprint.of_rows(gradient.parameters())

    def check_grid(self) -> None:
        """Refuse noise whose grid is too coarse for the model's gradients: before a ledger pays for a step."""
        self.engine.mechanism.check_grid(self.footprint.blocks)

    def fit(self, given: Limit | int) -> None:
        """Plan micro-batches that fit a limit, or of a given size, but no larger than a step usually is."""
        if isinstance(given, int):
            self.engine.plan_microbatches(min(given, self.usual_examples))
            return
        # Captured passes keep their memory at each point, while those of another form run as usual.
        shares = 1 if self.engine.gradient.repeated is None else 1 + len(self.points)
        most = given.bytes // shares
        self.engine.plan_microbatches(self._leaner(most, self._fitting(most)))
        self.engine.limit = given

    def _fitting(self, most: int) -> int:
        return microbatch_size(most, self.needed, self.usual_examples)

    def _leaner(self, most: int, size: int) -> int:
        """Compute heads without logits if these leave room for few examples; return the micro-batch's size.

        It makes them twice more, and saves passes over them. So it pays if products of fewer rows would be slow, or if
        one example's logits do not fit.
        """
        gradient = self.engine.gradient
        if gradient.way != "pairs" or gradient.repeated is not None or not gradient.free:
            return size
        before, rows = self.needed(size), size * gradient.proved.prove(self.example).rows
        if before <= most and (size == self.usual_examples or rows >= _ENOUGH):
            return size
        self._take(lean=True)
        leaner = self._fitting(most)
        if not any(isinstance(block, Chunked) for block in self.footprint.blocks) or self.needed(size) >= before:
            self._take(lean=False)
            return size
        gradient.reasons["logits"] = f"they leave room for a micro-batch of {size} examples in {words(most)}"
        return leaner

    def _take(self, lean: bool) -> None:
        self.engine.gradient.proved.lean = lean
        self.engine.gradient.proved.forget()
        del self.footprint

    def needed(self, examples: int) -> int:
        """Return the bytes of a sum over `examples` examples."""
        working, mechanism = self.engine.working, self.engine.mechanism
        parameters, scaled = sum(tensor.nbytes for tensor in working.tensors()), mechanism.vectors.scales is not None
        device = self.engine.gradient.parameters()[0].device
        copied = partial(mechanism.backend.copies_halves, device=device, scaled=scaled)
        return self.footprint.needed(
            examples, len(self.points), working.kept, parameters, several=self.several, scaled=scaled, copied=copied
        )


def fullest(plan: Plan) -> tuple[Point, ...]:
    """Return the points of a step that has most. Windows fill up at first; later the number changes little."""
    query: Any = plan.method.query
    looked_at = {*range(_FIRST_STEPS), *range(query.lags, query.lags + 8), plan.steps - 1}
    return max((query.points(step) for step in sorted(looked_at) if step < plan.steps), key=len)


@dataclass(frozen=True)
class Layer:
    """One trained tensor, or all the frozen ones."""

    name: str
    parameters: int
    operations: tuple[str, ...] = ()  # those of torch that took it together with examples
    rule: str = ""  # how its norms and its sum are taken
    rows: int = 0  # T of each example at one point, for pairs; 0 without pairs
    points: int = 0  # of the gradients in a step
    bytes: int = 0  # of each example; inputs that several tensors share count with each of them


@dataclass(frozen=True)
class Explanation:
    """How a run takes its steps; ``print`` shows it. It costs no privacy: no example was looked at."""

    way: str  # how gradients are found: "pairs" or "one-by-one"
    reasons: dict[str, str]  # why faster ways were not taken
    autocast: str  # "off", or the dtype of forward passes: "to bfloat16"
    microbatch_size: int
    examples: float  # of a step, in expectation
    peak_bytes: int  # of the sum over one micro-batch, in addition to parameters and the run's vectors
    limit_bytes: int | None  # that the micro-batch was chosen for; None if it was given
    limit_source: str
    points: int  # of the gradients in a step that has most of them
    layers: tuple[Layer, ...]  # trained tensors, then the frozen ones as one

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, texts, lists and dicts."""
        return {**asdict(self), "layers": [{**asdict(e), "operations": list(e.operations)} for e in self.layers]}

    def __str__(self) -> str:
        why = "".join(f"\n  not {way!r}: {reason}" for way, reason in self.reasons.items())
        limit = self.limit_source if self.limit_bytes is None else f"{words(self.limit_bytes)}, {self.limit_source}"
        return "\n".join([
            f"gradients: {self.way!r}{why}",
            f"autocast of forward passes: {self.autocast}",
            f"points of a step: {self.points}",
            f"micro-batch: {self.microbatch_size} examples, of about {self.examples:.0f} in a step",
            f"peak memory of its sum: {words(self.peak_bytes)} (limit: {limit})",
            "",
            *_table(self.layers),
            "",
            "Sizes at a step with most points: no data were looked at, it costs no privacy.",
        ])  # fmt: skip


def _table(layers: tuple[Layer, ...]) -> Iterator[str]:
    head = ("tensor", "parameters", "operations", "rule", "rows", "points", "for each example")
    cells = [head, *(_cells(layer) for layer in layers)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
    texts = {0, 2, 3}
    for row in cells:
        padded = (c.ljust(w) if k in texts else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(padded).rstrip()


def _cells(layer: Layer) -> tuple[str, ...]:
    numbers = (str(number) if number else "" for number in (layer.rows, layer.points))
    size = words(layer.bytes) if layer.bytes else ""
    return (layer.name, f"{layer.parameters:,}", ", ".join(layer.operations), layer.rule, *numbers, size)


def explain(rehearsal: Rehearsal) -> Explanation:
    """Return how a run takes its steps."""
    engine, limit = rehearsal.engine, rehearsal.engine.limit
    gradient = engine.gradient
    if engine.mechanism.peers.shards:
        raise ArgumentError("private.explain() of a fully_shard model: must be called for a run of the whole model")
    named = gradient.model.named_parameters()
    frozen = [parameter.numel() for name, parameter in named if name not in gradient.names]
    return Explanation(
        way=gradient.way,
        reasons=dict(gradient.reasons),
        autocast=precision.words(gradient.autocast),
        microbatch_size=engine.microbatch_size,
        examples=rehearsal.expected_examples,
        peak_bytes=rehearsal.needed(engine.microbatch_size),
        limit_bytes=None if limit is None else limit.bytes,
        limit_source="microbatch_size was given" if limit is None else limit.source,
        points=len(rehearsal.points),
        layers=(
            *_layers(rehearsal),
            *([Layer(f"{len(frozen)} frozen tensors", sum(frozen), rule="frozen")] if frozen else []),
        ),
    )


def _layers(rehearsal: Rehearsal) -> Iterator[Layer]:
    """Yield the row of each trained tensor: the blocks of all points together, which have only shapes."""
    footprint, points, gradient = rehearsal.footprint, rehearsal.points, rehearsal.engine.gradient
    blocks = [joined(block.weighted(float(point.weight)) for point in points) for block in footprint.blocks]
    vectors, backend = rehearsal.engine.mechanism.vectors, rehearsal.engine.mechanism.backend
    if vectors.scales is not None:
        blocks = scaled(blocks)
    kept = rehearsal.engine.working.kept  # the dtype of an array under the backend
    device = gradient.parameters()[0].device
    for place, block in enumerate(blocks):
        total = sum(array.numel() * kept(array.dtype).itemsize for array in arrays_of(block))
        yield Layer(
            gradient.names[place],
            math.prod(block.shape),
            gradient.operations(place),
            rule_of(block, backend, device, scaled=vectors.scales is not None),
            rows=_rows(block) // len(points),
            points=len(points),
            bytes=total // footprint.count,
        )


def rule_of(block: Block, backend: Backend[Any], device: torch.device, *, scaled: bool) -> str:
    """Return in words how a block's norms and its sum are taken."""
    if isinstance(block, Rows):
        return "rows"
    if isinstance(block, Embedding):
        return "table of tokens"
    if isinstance(block, Tied):
        return "tied: table and rows" if isinstance(block.linear, Rows) else "tied: table and pairs"
    if isinstance(block, Chunked):
        return "head without logits" if len({type(part) for part in block.parts}) == 1 else "tied: head without logits"
    assert isinstance(block, Linear)
    return f"pairs: {backend.linear_way(block.layer, device, scaled=scaled)}"


def _rows(block: Block) -> int:
    parts = block.gradients if isinstance(block, Linear | Embedding) else ()
    if isinstance(block, Tied):
        return _rows(block.linear)
    if isinstance(block, Chunked):
        parts = tuple(part.inputs for part in block.parts if hasattr(part, "inputs"))
    return sum(int(part.shape[1]) for part in parts)
