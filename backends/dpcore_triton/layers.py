"""Linear layers as one table: each kernel on their pairs takes all of them in one launch, whatever their number."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton.language as tl

from dpcore.spec.pair_ops import LinearPairs
from dpcore_triton.described import address, present
from dpcore_triton.launch import common_device, float32_only, jit, launch, read_as_float32, table
from dpcore_triton.pairs import Parts, parts_of
from dpcore_triton.row_norms import Scales, vectors

Tensor = torch.Tensor

# Numbers of a layer in the table: its first unit, those of `Layer`, and two of the kernel's own.
FIELDS = tl.constexpr(8)


class Layer(NamedTuple):
    """What all kernels read of a layer, in the order of the table."""

    p: int
    q: int
    total: int  #: T, its positions
    first: int  #: of them, among those of all layers
    scale: int  #: address, 0 for none


class Layers(NamedTuple):
    """Linear layers on the device: their parts one after the other, so that a layer's positions are neighbors."""

    parts: Parts
    rows: list[Layer]
    kept: Sequence[Tensor | None]  #: what the addresses of scales point to

    def start(self, function: Any, units: Sequence[int], copies: int, own: Any, *args: Any, **meta: Any) -> None:
        """Start a kernel of `copies` programs for each unit of the layers; `own` are two numbers for each layer."""
        if not any(units):
            return
        rows = [(*row, *numbers) for row, numbers in zip(self.rows, own, strict=True)]
        on_device, layer_of, count = table(rows, units, self.parts.device)
        given = self.parts.rows, self.parts.row_of, on_device, layer_of
        launch(function, (count * copies,), self.parts.device, *given, *args, **meta)


def layers_of(layers: Sequence[LinearPairs[Tensor]], scales: Scales, exponents: Sequence[int]) -> Layers:
    """Put the layers' addresses, and their point weights times ``2 ** -exponent``, on their device."""
    named: dict[str, Sequence[Tensor]] = {}
    for index, layer in enumerate(layers):
        named |= {f"layers[{index}].inputs": layer.inputs, f"layers[{index}].gradients": layer.gradients}
    read_as_float32(**named)
    float32_only(scales=present(scales))
    device = common_device(scales=present(scales), **named)
    given = vectors(scales, range(len(layers)))
    parts = parts_of(
        [part for layer in layers for part in layer.inputs],
        [part for layer in layers for part in layer.gradients],
        [weight for layer in layers for weight in layer.point_weights],
        device,
        [exponent for layer, exponent in zip(layers, exponents, strict=True) for _ in layer.point_weights],
    )
    totals = [sum(part.shape[1] for part in layer.inputs) for layer in layers]
    rows = [
        Layer(layer.inputs[0].shape[2], layer.gradients[0].shape[2], total, stop - total, address(scale))
        for layer, total, stop, scale in zip(layers, totals, accumulate(totals), given, strict=True)
    ]
    return Layers(parts, rows, given)


@jit
def layer_at(unit, layers, layer_of):
    """Return where the table's row of a unit's layer begins."""
    return layers + tl.load(layer_of + unit).to(tl.int64) * FIELDS


@jit
def located(layers, layer_of, examples):
    """Return the row of a program's layer, and which of the layer's programs it is: one example's are neighbors."""
    layer = layer_at(tl.program_id(0) // examples, layers, layer_of)
    return layer, (tl.program_id(0) - tl.load(layer) * examples).to(tl.int32)


@jit
def sizes_of(layer):
    """Return p, q, and the layer's first position and the one after its last."""
    first = tl.load(layer + 4).to(tl.int32)
    return (
        tl.load(layer + 1).to(tl.int32),
        tl.load(layer + 2).to(tl.int32),
        first,
        first + tl.load(layer + 3).to(tl.int32),
    )


@jit
def scale_of(layer, row, column, p, q):
    """Return these rows and columns of the layer's scale; ones where it has none."""
    where = tl.load(layer + 5)
    inside = (row < tl.where(where != 0, q, 0))[:, None] & (column < p)[None, :]
    at = where.to(tl.pointer_type(tl.float32)) + (row[:, None] * p + column[None, :])
    return tl.load(at, mask=inside, other=1.0).to(tl.float64)
