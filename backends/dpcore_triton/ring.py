"""Noise from a ring of earlier vectors: one step of a sum over those of the last steps.

A loop over the vectors goes around the elements of a thread: its sums stay in registers, whatever the number of vectors
is, and each weight and address is read once for all of them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from dpcore.spec.check import check_ring
from dpcore.spec.ops import RingCoefficients
from dpcore_triton.arrays import written_back
from dpcore_triton.filter import pointers
from dpcore_triton.launch import (
    ELEMENTS,
    common_device,
    current_stream,
    float32_only,
    jit,
    kernel,
    launch,
    numbers,
    table,
)
from dpcore_triton.stream import LANES, load_at, store_at


def ring(x: torch.Tensor, vectors: Sequence[torch.Tensor], coefficients: RingCoefficients) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.ring`."""
    check_ring(x, vectors, coefficients)
    float32_only(x=[x])
    device = common_device(x=[x], vectors=vectors)
    x = x.detach().contiguous()
    y = torch.empty_like(x)
    taps = numbers(ring_taps(coefficients), device, current_stream(device))
    with written_back(*vectors) as lent:
        addresses = [array.data_ptr() for array in (x, y, *lent)]
        rows, _, programs = table([(x.numel(), *addresses)], [-(-x.numel() // ELEMENTS)], device)
        kind: dict[str, Any] = {"ORDER": len(vectors), "KEEPS": coefficients.keeps, "ELEMENTS": ELEMENTS}
        launch(_ring_kernel, (programs,), device, rows, taps, int(coefficients.place), **kind)
    return y


def ring_taps(coefficients: RingCoefficients) -> tuple[float, ...]:
    """Return the reciprocal of the normalizer, then the weights."""
    return (float(1 / coefficients.normalizer), *map(float, coefficients.weights))


@kernel("place")
def _ring_kernel(row, taps, place, ORDER: tl.constexpr, KEEPS: tl.constexpr, ELEMENTS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = i < tl.load(row + 1)
    x, y = pointers(row, i, 2, 2)
    found = ring_elements((tl.load(x, mask=mask, other=0.0),), row + 4, i, i, 0, tl.load(row + 1), taps, place,
                          ORDER, KEEPS, True)  # fmt: skip
    tl.store(y, found[0], mask=mask)


@jit
def ring_elements(
    x, ring, index, first, low, high, taps, place, ORDER: tl.constexpr, KEEPS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Take one step for a tuple of elements, each LANES further on than the one before; return its outputs.

    `ring` points to the addresses of the vectors, and `index` is where the first elements stand in them; those are
    in the tensor whose places, from `first` on, lie in ``low <= place < high``.
    """
    y = x
    for j in range(1, ORDER + 1):
        weight = tl.load(taps + j)
        vector = tl.load(ring + (place + ORDER - j) % ORDER).to(tl.pointer_type(tl.float32)) + index
        added = ()
        for word in tl.static_range(len(x)):
            shift = word * LANES
            earlier = load_at(vector + shift, first + shift, low, high, MASKED)
            added += (y[word] + weight * earlier,)  # type: ignore[assignment]
        y = added
    normalizer, divided = tl.load(taps), ()
    for word in tl.static_range(len(x)):
        divided += (y[word] * normalizer,)  # type: ignore[assignment]
    if ORDER > 0:
        vector = tl.load(ring + place).to(tl.pointer_type(tl.float32)) + index
        kept = divided if KEEPS == "output" else x
        for word in tl.static_range(len(x)):
            shift = word * LANES
            store_at(vector + shift, kept[word], first + shift, low, high, MASKED)
    return divided
