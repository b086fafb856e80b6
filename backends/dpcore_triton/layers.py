"""Linear layers as one table: each kernel on their pairs takes all layers in one launch."""
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
from dpcore_triton.pairs import Parts, dense, parts_of
from dpcore_triton.row_norms import Scales, vectors

Tensor = torch.Tensor

# Numbers of a layer in the table: its first unit, those of `Layer`, and two of the kernel's own.
FIELDS = tl.constexpr(8)


class Layer(NamedTuple):
    """The numbers of a layer that all kernels read, in the order of the table."""

    p: int
    q: int
    total: int  #: T, its positions
    first: int  #: its first position among those of all layers
    scale: int  #: address, 0 for none


class Layers(NamedTuple):
    """Linear layers on the device: their parts one after the other, so that a layer's positions are neighbors."""

    parts: Parts
    rows: list[Layer]
    kept: Sequence[Tensor | None]  #: the tensors at the scales' addresses
    #: The dtype of each layer's arrays, and whether all rows begin at multiples of 16 bytes, have multiples of 8
    #: numbers, and lie near those of the same example.
    kinds: list[tuple[str, bool]]

    def split(self, layer: int) -> bool:
        """Return whether tensor cores take a layer's numbers as two each: those of float32."""
        return self.kinds[layer][0] == "float32"

    def start(self, function: Any, units: Sequence[int], copies: int, own: Any, *args: Any, **meta: Any) -> None:
        """Start a kernel of `copies` programs for each unit of the layers; `own` are two numbers for each layer.

        A kernel that takes the kind of the arrays has a launch for each kind.
        """
        rows = [(*row, *numbers) for row, numbers in zip(self.rows, own, strict=True)]
        asks = "KIND" in function.arg_names
        kinds = [kind if asks else None for kind in self.kinds]
        for kind in dict.fromkeys(kind for kind, count in zip(kinds, units, strict=True) if count):
            counts = [count if each == kind else 0 for count, each in zip(units, kinds, strict=True)]
            on_device, layer_of, count = table(rows, counts, self.parts.device)
            given = self.parts.rows, self.parts.row_of, on_device, layer_of
            chosen = {} if kind is None else {"KIND": getattr(tl, kind[0]), "ALIGNED": kind[1]}
            launch(function, (count * copies,), self.parts.device, *given, *args, **chosen, **meta)


def layers_of(
    layers: Sequence[LinearPairs[Tensor]], scales: Scales, exponents: Sequence[int], *, halves: bool = False
) -> Layers:
    """Put the layers' addresses, and their point weights times ``2 ** -exponent``, on their device.

    Arrays of 16 bits are copied to float32, unless kernels read `halves`.
    """
    named: dict[str, Sequence[Tensor]] = {}
    for index, layer in enumerate(layers):
        named |= {f"layers[{index}].inputs": layer.inputs, f"layers[{index}].gradients": layer.gradients}
    read_as_float32(**named)
    float32_only(scales=present(scales))
    device = common_device(scales=present(scales), **named)
    given = vectors(scales, range(len(layers)))
    sides = [(dense(layer.inputs, halves=halves), dense(layer.gradients, halves=halves)) for layer in layers]
    parts = parts_of(
        [part for inputs, _ in sides for part in inputs],
        [part for _, gradients in sides for part in gradients],
        [weight for layer in layers for weight in layer.point_weights],
        device,
        [exponent for layer, exponent in zip(layers, exponents, strict=True) for _ in layer.point_weights],
        halves=halves,
    )
    totals = [sum(part.shape[1] for part in layer.inputs) for layer in layers]
    rows = [
        Layer(layer.inputs[0].shape[2], layer.gradients[0].shape[2], total, stop - total, address(scale))
        for layer, total, stop, scale in zip(layers, totals, accumulate(totals), given, strict=True)
    ]
    return Layers(parts, rows, given, [_kind_of([*inputs, *gradients]) for inputs, gradients in sides])


def _kind_of(arrays: Sequence[Tensor]) -> tuple[str, bool]:
    """Return the dtype of a layer's arrays, and whether they are aligned."""
    numbers = [number for x in arrays for number in (x.data_ptr() // 2, *x.stride()[:2], x.shape[2])]
    # Kernels of aligned arrays compute an example's places with 32 bits.
    near = all(x.stride(1) * x.shape[1] < 1 << 30 for x in arrays)
    return str(arrays[0].dtype).removeprefix("torch."), near and all(number % 8 == 0 for number in numbers)


@jit
def layer_at(unit, layers, layer_of):
    """Return where the table's row of a unit's layer begins."""
    return layers + tl.load(layer_of + unit).to(tl.int64) * FIELDS


@jit
def located(layers, layer_of, examples):
    """Return the row of a program's layer, and its number in the layer: programs of one example are neighbors."""
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
    """Return these rows and columns of the layer's scale; ones if it has none."""
    where = tl.load(layer + 5)
    inside = (row < tl.where(where != 0, q, 0))[:, None] & (column < p)[None, :]
    at = where.to(tl.pointer_type(tl.float32)) + (row[:, None] * p + column[None, :])
    return tl.load(at, mask=inside, other=1.0).to(tl.float64)
