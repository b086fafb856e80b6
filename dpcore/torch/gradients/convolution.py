"""The weight's gradient of a convolution, example by example: rows by one convolution, or pairs of patches.

Notes
-----
With T places of the output, patches of p numbers and q channels, rows are q p numbers of each example, and the product
that makes them takes T p q multiplications. A plain step's weight gradient takes as many; one call of the library's
convolution, with the examples as groups, is nearly as fast. Pairs are T (p + q) numbers, and norms by inner products of
rows take T^2 (p + q); their sum takes T p q in float64. So ``r = q p / (T (p + q))`` is how much larger rows are, and
how much more their norms cost.

Large rows are slow: their memory costs more than their arithmetic. Pairs are taken from r = `_PAIRS` on. In trials on
one core rows were faster up to r = 1, and pairs from r = 3.6 on. On a CPU rows are made in chunks of `_CHUNK` bytes,
whose memory is reused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dpcore.stages.clipping.blocks import Block, Linear, Rows

_PAIRS = 3.0
_CHUNK = 2 << 20


def weight_block(
    shape: Sequence[int],
    x: torch.Tensor,
    e: torch.Tensor,
    examples: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    transposed: bool,
    groups: int,
) -> Block:
    """Return the block of a weight of this shape, given input and output gradient (B times rows, channels, places...)."""
    q, p = shape[0], math.prod(shape[1:])
    places = len(x) // examples * math.prod((x if transposed else e).shape[2:])
    if groups == 1 and q * p >= _PAIRS * places * (p + q):
        # A transposed convolution is the gradient of a convolution: input and output gradient are exchanged.
        narrow, wide = (x, e) if transposed else (e, x)
        columns = _patches(wide, shape[2:], narrow.shape[2:], stride, padding, dilation)
        rows = narrow.flatten(2).mT.reshape(examples, -1, q)
        columns = columns.reshape(examples, -1, p)
        times = rows.shape[1]
        return Linear((columns,), (rows,), (1.0,), gram=times * (p + q) < p * q)
    rows = e.new_empty(examples, *shape)
    step = max(1, _CHUNK // (math.prod(shape) * rows.element_size())) if rows.device.type == "cpu" else examples
    each = (t.reshape(examples, -1, *t.shape[1:]) for t in (e, x))
    for part, *folded in zip(torch.split(rows, step), *(torch.split(t, step) for t in each), strict=True):
        # Only the weight's shape counts. A tensor expanded from one number would be copied.
        weight = e.new_empty(len(part) * q, *shape[1:])
        part.copy_(torch.ops.aten.convolution_backward(
            *(t.transpose(0, 1).flatten(1, 2) for t in folded), weight, None, stride, padding, dilation,
            transposed, output_padding, groups * len(part), [False, True, False],
        )[1].view_as(part))  # fmt: skip
    return Rows(rows.flatten(1))


def _patches(
    x: torch.Tensor, kernel: Sequence[int], places: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """Return what each place of the output saw of its input: (B, places, channels times kernel)."""
    dims = len(kernel)
    seen = F.pad(x, [n for n in reversed(padding) for _ in range(2)])
    for d in range(dims):
        size = dilation[d] * (kernel[d] - 1) + 1
        seen = seen.unfold(2 + d, size, stride[d])[..., :: dilation[d]].narrow(2 + d, 0, places[d])
    order = [0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims)]
    return seen.permute(order).reshape(len(x), math.prod(places), -1)
