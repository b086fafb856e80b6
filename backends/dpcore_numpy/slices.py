"""Layers of one row by factors of two bytes: what `dpcore.spec.contributions` says of them, in plain arithmetic.

No operation here is faster by them. It is what such a sum means where 8-bit tensor cores make it, to the bit: numbers
are multiplied by powers of two, then in float32, and added as integers; what an example has one of is float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.contributions import LARGEST_FACTOR, multiple_of
from dpcore.spec.grid import nearest
from dpcore_numpy.arrays import at_least_float32

Floats = NDArray[Any]
Wide = NDArray[np.float64]
Integers = NDArray[np.int64]


def add_slices(inputs: Floats, gradients: Floats, weights: Wide, out: Wide, longest: float) -> None:
    """Add ``weights[i] e_i a_i^T`` of rows (B, p) and (B, q) to `out` (q, p), rounded to k_i.

    Parameters
    ----------
    inputs, gradients : (B, p) and (B, q) arrays of float32 or 16 bits
    weights : (B,) float64 array
        The point's weight included.
    out : (q, p) float64 array of integers, in place
    longest : float
        See `dpcore.spec.pair_ops.PairOperations.linear_sums`.
    """
    a, e = sliced_factors(inputs, gradients, weights, longest)
    out += multiple_of(longest) * (e.T @ a).astype(np.float64)


def sliced_factors(inputs: Floats, gradients: Floats, weights: Wide, longest: float) -> tuple[Integers, Integers]:
    """Return a' (B, p) and e' (B, q), with ``m |a'| (|e'| - sqrt(q)) <= |weights| |e| |a|``; zeros if not finite."""
    a, e = (at_least_float32(side).copy() for side in (inputs, gradients))
    with np.errstate(all="ignore"):  # a warning would tell of one example
        used = (weights != 0) & np.isfinite(a).all(axis=1) & np.isfinite(e).all(axis=1)
        a[~used], e[~used] = 0, 0
        x, a_unit, a_root = _relative(a)
        y, e_unit, e_root = _relative(e)
        # Of 1/2 a coordinate for rounding in `_relative`, and a little for numbers that underflow on the way.
        a_room, e_room = (0.501 * np.sqrt(float(side.shape[1])) for side in (x, y))
        a_factors = _rounded(x, 1 / (a_root + a_room) * LARGEST_FACTOR)
        size = np.sqrt(np.square(a_factors).sum(axis=1).astype(np.float64))
        length = np.abs(weights) * ((a_root - a_room) * a_unit) * ((e_root - e_room) * e_unit)
        length = length / (multiple_of(longest) * size) * (1 - 2.0**-20)
        # Not above 0 if it is not a number: of rows of zeros.
        length = np.where(length > 0, np.minimum(length, LARGEST_FACTOR), 0.0)
        x = y * (np.sign(weights) * length / (e_root + e_room)).astype(np.float32)[:, None]
        below = np.floor(x)
        e_factors = (below + (x - below > hashed(x))).astype(np.int64)
    return a_factors, e_factors


def hashed(rows: Floats) -> Floats:
    """Return numbers of 24 bits from 0 on, below 1, that follow from the bits of each number and from its column."""
    h = rows.view(np.uint32) ^ (np.arange(rows.shape[1], dtype=np.uint32) * np.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return (h >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def _relative(rows: Floats) -> tuple[Floats, Wide, Wide]:
    """Return rows over powers of two, their largest number between 2^21 and 2^22; the powers; roots of their squares.

    The squares are those of the nearest integers, so that they have one sum.
    """
    largest = np.abs(rows).max(axis=1, initial=0.0)
    low = largest < 2.0**-64
    exponent = np.frexp(np.where(low, largest * np.float32(2.0**64), largest))[1].astype(np.int64) - 64 * low
    up = 22 - exponent
    first = up >> 1
    scaled = rows * np.ldexp(np.float32(1), first)[:, None] * np.ldexp(np.float32(1), up - first)[:, None]
    integers = nearest(scaled.astype(np.float64)).astype(np.int64)
    return scaled, np.ldexp(1.0, -up), np.sqrt(np.square(integers).sum(axis=1).astype(np.float64))


def _rounded(rows: Floats, scale: Wide) -> Integers:
    """Return the nearest integers of rows times a number each."""
    found: Integers = nearest((rows * scale.astype(np.float32)[:, None]).astype(np.float64)).astype(np.int64)
    return found
