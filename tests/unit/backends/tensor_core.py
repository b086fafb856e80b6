"""A tensor core in NumPy: exact products of 16-bit numbers, aligned to the largest and truncated, block by block.

Arrays are float64 and hold float32 numbers. `dpcore_triton.cores` says where the model is from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Core(NamedTuple):
    """How many products are added at once, and how many bits more than float32's are kept meanwhile."""

    products: int
    bits: int


A100, H100 = Core(8, 1), Core(16, 2)

# Float32 numbers of whose product splitting leaves out as much as it can.
LEFT_OUT = 1 + 2.0**-8 - 2.0**-17, 1 + 2.0**-8 + 2.0**-17 + 2.0**-22

Dot = Callable[[Array, Array, Array], Array]


def truncating(core: Core) -> Dot:
    """Return the product of a tensor core: (..., M, D), (..., D, N) and an accumulator."""

    def dot(x: Array, y: Array, total: Array) -> Array:
        for first in range(0, x.shape[-1], core.products):
            some = slice(first, first + core.products)
            products = x[..., :, None, some] * y[..., some, :].swapaxes(-1, -2)[..., None, :, :]
            terms = np.concatenate([total[..., None], products], axis=-1)
            unit = np.ldexp(1.0, np.frexp(np.abs(terms).max(axis=-1))[1] - 24 - core.bits)
            mantissa, exponent = np.frexp(np.trunc(terms / unit[..., None]).sum(axis=-1) * unit)
            total = np.ldexp(np.trunc(np.ldexp(mantissa, 24)), exponent - 24)
        return total

    return dot


def exact(x: Array, y: Array, total: Array) -> Array:
    """Return the product that rounds as little as float64."""
    return total + x @ y


def narrow(x: Array) -> Array:
    """Return the nearest bfloat16 numbers, away from 0 of two."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def multiplied(x: Array, y: Array, dot: Dot, split: bool) -> Array:
    """See `dpcore_triton.cores.multiplied`."""
    total = np.zeros((*x.shape[:-1], y.shape[-1]))
    if not split:
        return dot(x, y, total)
    x1, y1 = narrow(x), narrow(y)
    total = dot(x1, narrow(y - y1), total)
    total = dot(narrow(x - x1), y1, total)
    return dot(x1, y1, total)


def summed(x: Array, y: Array, dot: Dot, split: bool, chained: bool = False) -> Array:
    """Return x y, (..., M, D) and (..., D, N): chunks on the tensor core, which float32 adds up, or one chain."""
    total, depth = np.zeros((*x.shape[:-1], y.shape[-1])), 16 if split else 64
    if chained:
        return dot(x, y, total)
    for first in range(0, x.shape[-1], depth):
        some = slice(first, first + depth)
        total = np.float32(total + multiplied(x[..., some], y[..., some, :], dot, split)).astype(np.float64)
    return total
