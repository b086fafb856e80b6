"""Convolutions, also transposed ones: rows by one convolution with a group for each example, or pairs of patches.

Notes
-----
With T places of the output, patches of p numbers and q channels, rows are q p numbers of each example, and the product
that makes them takes T p q multiplications: as many as the weight gradient of a plain step, and in one call of the
library's convolution, with the examples as groups, nearly as fast. Pairs are T (p + q) numbers, and norms by inner
products of rows take T^2 (p + q); their sum takes T p q in float64. So ``r = q p / (T (p + q))`` says how much larger
rows are, and how much more their norms cost.

Rows are slow where they are large: their memory costs more than their arithmetic. Pairs are taken from r = `_PAIRS` on,
which is between what trials on one core found faster by rows (up to 1) and by pairs (from 3.6). On a CPU rows are made
in chunks of `_CHUNK` bytes, whose memory is used again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dpcore.stages.clipping.blocks import Block
from dpcore.torch.sources.derived import Derived
from dpcore.torch.sources.places import UnknownLayout
from dpcore.torch.sources.tracer import Operation, Rule

_PAIRS = 3.0
_CHUNK = 2 << 20
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


class _Form(NamedTuple):
    """What a convolution does to places: one number for each of its dimensions."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    output_padding: list[int]
    transposed: bool
    groups: int


def convolve(transposed: bool) -> Rule:
    """Return the rule of ``F.conv1d``, ``conv2d`` and ``conv3d``, or of their transposed kinds."""
    names = _TRANSPOSED if transposed else _NAMES

    def rule(operation: Operation) -> Any:
        values = dict(zip(names, operation.args, strict=False)) | operation.kwargs
        inputs, weight = values["input"], values["weight"]
        matrix, vector = operation.derived(weight), operation.derived(values.get("bias"))
        layout, (given,) = operation.layout(inputs), operation.gave
        if layout is None or given is None or layout.dim or given.dim or inputs.dim() != weight.dim():
            raise UnknownLayout("a convolution whose input holds no examples")
        form, uneven = _form(values, weight, transposed)
        output = operation.run()

        def collect(gradient: torch.Tensor, saved: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
            if matrix is not None:
                x = F.pad(saved[0].to(gradient.dtype), uneven) if any(uneven) else saved[0].to(gradient.dtype)
                yield matrix, _weight_block(matrix, x, gradient, operation.examples, form)
            if vector is not None:
                each = gradient.reshape(operation.examples, layout.rows, gradient.shape[1], -1)
                yield vector, vector.whole(each.sum((1, 3)))

        return operation.tap(output, () if matrix is None else (inputs,), collect)

    return rule


def _form(values: dict[str, Any], weight: torch.Tensor, transposed: bool) -> tuple[_Form, list[int]]:
    """Return the form, and by how much the input is longer after its end than before its beginning (for `F.pad`)."""
    dims = weight.dim() - 2

    def each(name: str, default: int) -> list[int]:
        value = values.get(name, default)
        found = [value] * dims if isinstance(value, int) else list(value)
        return found * dims if len(found) == 1 else found

    dilation, groups = each("dilation", 1), values.get("groups", 1)
    uneven = [0] * (2 * dims)
    if isinstance(values.get("padding"), str):
        total = [
            d * (k - 1) if values["padding"] == "same" else 0 for d, k in zip(dilation, weight.shape[2:], strict=True)
        ]
        padding = [t // 2 for t in total]
        uneven[1::2] = [t % 2 for t in total[::-1]]
    else:
        padding = each("padding", 0)
    return _Form(each("stride", 1), padding, dilation, each("output_padding", 0), transposed, groups), uneven


def _weight_block(matrix: Derived, x: torch.Tensor, e: torch.Tensor, examples: int, form: _Form) -> Block:
    """Return the block of the weight, given input and output gradient (B times rows, channels, places...)."""
    shape = matrix.tensor.shape
    q, p = shape[0], math.prod(shape[1:])
    places = len(x) // examples * math.prod((x if form.transposed else e).shape[2:])
    if form.groups == 1 and q * p >= _PAIRS * places * (p + q):
        # A transposed convolution is the gradient of one: input and output gradient change their parts.
        narrow, wide = (x, e) if form.transposed else (e, x)
        columns = _patches(wide, shape[2:], narrow.shape[2:], form)
        rows = narrow.flatten(2).mT.reshape(examples, -1, q)
        return matrix.pairs(rows, columns.reshape(examples, -1, p))
    rows = e.new_empty(examples, *shape)
    step = max(1, _CHUNK // (math.prod(shape) * rows.element_size())) if rows.device.type == "cpu" else examples
    each = (t.reshape(examples, -1, *t.shape[1:]) for t in (e, x))
    for part, *folded in zip(torch.split(rows, step), *(torch.split(t, step) for t in each), strict=True):
        # Only the weight's shape counts; one expanded from a number would be copied.
        weight = e.new_empty(len(part) * q, *shape[1:])
        part.copy_(torch.ops.aten.convolution_backward(
            *(t.transpose(0, 1).flatten(1, 2) for t in folded), weight, None, form.stride, form.padding, form.dilation,
            form.transposed, form.output_padding, form.groups * len(part), [False, True, False],
        )[1].view_as(part))  # fmt: skip
    return matrix.whole(rows)


def _patches(x: torch.Tensor, kernel: torch.Size, places: torch.Size, form: _Form) -> torch.Tensor:
    """Return what each place of the output saw of its input: (B, places, channels times kernel)."""
    dims = len(kernel)
    seen = F.pad(x, [n for n in reversed(form.padding) for _ in range(2)])
    for d in range(dims):
        size = form.dilation[d] * (kernel[d] - 1) + 1
        seen = seen.unfold(2 + d, size, form.stride[d])[..., :: form.dilation[d]].narrow(2 + d, 0, places[d])
    order = [0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims)]
    return seen.permute(order).reshape(len(x), math.prod(places), -1)
