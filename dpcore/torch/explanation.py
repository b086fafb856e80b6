"""What a run says about its steps: fields, and a text with a table of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dpcore.spec.free_memory import words


@dataclass(frozen=True)
class Layer:
    """One trained tensor, or what is not of one tensor alone.

    Attributes
    ----------
    name : str
    parameters : int
    operations : tuple of str
        Those of torch that took it together with examples.
    rule : str
        How its norms and its sum are taken.
    rows : int
        Rows T of each example at one point, of which pairs are made; 0 where there is no pair.
    points : int
        Where gradients are taken in a step.
    bytes : int
        Held for each example. Inputs that several tensors share count with each of them.
    share : float
        Of the time of a step.
    """

    name: str
    parameters: int
    operations: tuple[str, ...] = ()
    rule: str = ""
    rows: int = 0
    points: int = 0
    bytes: int = 0
    share: float = 0.0


@dataclass(frozen=True)
class Explanation:
    """How a run takes its steps; ``print`` shows it. It costs no privacy: no example was looked at.

    Attributes
    ----------
    way : str
        How gradients are found: "pairs", "vmap" or "one-by-one".
    reasons : dict
        Why faster ways were not taken.
    microbatch_size : int
        Examples at once.
    examples : float
        Of a step, in expectation.
    peak_bytes : int
        Measured for the sum over one micro-batch, beside parameters and the run's vectors.
    limit_bytes : int or None
        What the micro-batch was chosen for; None where it was given.
    limit_source : str
    points : int
        Where gradients are taken in a step that has most of them.
    seconds : float
        Of a step with that many examples.
    layers : tuple of Layer
        The trained tensors, then "forward and backward", "noise and update", and the frozen tensors.
    """

    way: str
    reasons: dict[str, str]
    microbatch_size: int
    examples: float
    peak_bytes: int
    limit_bytes: int | None
    limit_source: str
    points: int
    seconds: float
    layers: tuple[Layer, ...]

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
