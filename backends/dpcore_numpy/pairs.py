"""One side of the pairs, activations or output gradients: its parts joined along time, in the range a product needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpcore_numpy.arrays import at_least_float32

Floats = NDArray[Any]
Wide = NDArray[np.float64]
Indices = NDArray[np.int64]

# Unit roundoffs; and the most that a float32 operation loses to underflow, even if denormals are flushed to zero.
U32, U64, TINY = 2.0**-24, 2.0**-53, 2.0**-126
# Rows are taken as they are if their Frobenius norm is within 2^-12 .. 2^12.
RANGE = 12
_COLUMNS = 4096


def gamma(terms: int, u: float) -> float:
    """Return the relative rounding of a sum of `terms` products, in any order; infinite if ``terms u >= 1/2``."""
    return terms * u / (1 - terms * u) if terms * u < 0.5 else math.inf


class Side:
    """J parts (B, T_j, n) with weights, joined along time to rows r_i (T, n) = ``unit 2^exponents[i]`` times `narrow`.

    Attributes
    ----------
    unit : float
        The largest of the weights in size, with its sign, so that a single part is never multiplied.
    """

    def __init__(self, parts: Sequence[Floats], weights: Sequence[float] | None = None) -> None:
        self.parts = parts
        given = np.ones(len(parts)) if weights is None else np.array([float(weight) for weight in weights])
        self.unit = float(given[np.abs(given).argmax()])
        self.ratios: list[float] = (given / (self.unit or 1.0)).tolist()
        self.examples, _, self.width = parts[0].shape
        self.time = sum(part.shape[1] for part in parts)
        self.double = parts[0].dtype == np.float64

    @cached_property
    def measured(self) -> tuple[NDArray[np.int64], Wide]:
        """Return the exponents (B,), and upper bounds on the squared norms of the rows (B, T) divided by their power.

        Divided so, an example's rows have a Frobenius norm within 2^-12 .. 2^12, unless they are 0 or not finite.

        Notes
        -----
        A float32 inner product of n <= 4096 entries with themselves is off by gamma_n < 2^-12 of itself and by n 2^-126
        if squares underflow. If the sum of all is outside 2^-60 .. 2^60, the example is measured in float64, relative
        to its largest entry.
        """
        squares = np.zeros((self.examples, self.time))
        for first in range(0, 0 if self.double else self.width, _COLUMNS):
            start = 0
            for part, ratio in zip(self.parts, self.ratios, strict=True):
                piece = at_least_float32(part[:, :, first : first + _COLUMNS])
                squares[:, start : start + part.shape[1]] += ratio**2 * self.squares(piece)
                start += part.shape[1]
        total = squares.sum(axis=1)
        known = (total > 2.0**-60) & (total < 2.0**60)
        exponents = np.where(known, np.frexp(np.sqrt(total))[1], 0).astype(np.int64)
        if len(self.parts) == 1:
            exponents[np.abs(exponents) <= RANGE] = 0
        squares = np.ldexp(squares * (1 + 2.0**-11) + self.width * TINY, -2 * exponents[:, None])
        for i in np.flatnonzero(~known):
            rows = self.wide(slice(i, i + 1), normalized=False)[0]
            largest = float(np.abs(rows).max(initial=0.0))
            exponents[i] = max(math.frexp(largest)[1], -1000) if math.isfinite(largest) else 0
            rows = np.ldexp(rows, -exponents[i])
            squares[i] = np.vecdot(rows, rows) * (1 + 2.0**-11)
        return exponents, squares

    @staticmethod
    def squares(rows: Floats) -> Wide:
        """Return the squared norms of rows of at most 4096 float32 numbers, off by 2^-12 of themselves at most."""
        found: Wide = np.vecdot(rows, rows).astype(np.float64)
        return found

    def wide(self, chosen: slice | Indices, columns: slice = slice(None), *, normalized: bool = True) -> Wide:
        """Return examples' rows over `unit`, (n, T, columns) in float64; if `normalized` over their power, too."""
        powers = np.ldexp(1.0, -self.measured[0][chosen]) if normalized else np.ones(1)
        blocks = [part[chosen, :, columns] for part in self.parts]
        out, start = np.empty((len(blocks[0]), self.time, blocks[0].shape[2])), 0
        for block, ratio in zip(blocks, self.ratios, strict=True):
            piece, factor = out[:, start : start + block.shape[1]], ratio * powers
            np.copyto(piece, block)
            if not np.all(factor == 1):
                piece *= factor[:, None, None]
            start += block.shape[1]
        return out

    def narrow(self, i: int, columns: slice = slice(None)) -> Floats:
        """Return an example's rows in float32, (T, columns), divided by their power.

        An entry that is not the given one itself is at most 1 in size, rounded at most twice (if weights differ), and
        off by 2^-126 if it underflows.
        """
        exponent = int(self.measured[0][i])
        if exponent == 0 and len(self.parts) == 1:
            return at_least_float32(self.parts[0][i, :, columns])
        blocks = [at_least_float32(part[i, :, columns]) for part in self.parts]
        out = np.empty((self.time, blocks[0].shape[1]), np.float32)
        start = 0
        for block, ratio in zip(blocks, self.ratios, strict=True):
            factor = math.ldexp(ratio, -exponent)
            exact = np.float32(factor) if 2.0**-100 < abs(factor) < 2.0**100 else np.float64(factor)
            np.multiply(block, exact, out=out[start : start + len(block)], casting="same_kind")
            start += len(block)
        return out


class Bound(NamedTuple):
    """For each example (B,): bounds on the true sum's norm and on its rounding, and the sum of the terms' norms."""

    norms: Wide
    rounding: Wide
    terms: Wide
    factors: Any = False  #: (B,) of bool: examples that are added by factors; see `dpcore_numpy.linear.by_factors`


def factors_of(a: Side, e: Side, weights: Wide, most: float = 2.0**900) -> Wide:
    """Return the examples' weights for rows of both sides divided by their powers, of `most` in size at most.

    Clipped so that they stay finite times such rows: the product with a row of zeros must be 0, not NaN. Only an
    example whose vector is 0 reaches the limit; any other addend would be longer than 2^53.
    """
    part, exponent = np.frexp(weights)
    unit, more = math.frexp(e.unit)
    found: Wide = np.ldexp(part * unit, exponent + more + a.measured[0] + e.measured[0])
    return np.clip(found, -most, most)


def terms_of(a: Side, e: Side) -> Wide:
    """Return S, not scaled."""
    terms: Wide = np.vecdot(np.sqrt(a.measured[1]), np.sqrt(e.measured[1])) * (1 + gamma(a.time + 8, U64))
    return terms


def rounding_of(a: Side, e: Side, scale: Floats | None, terms: Wide, wide: bool) -> Wide:
    """Return the error bound of a product over T rows, one side of which may have been multiplied by a weight before.

    In float32 underflow adds at most 2^-126 for each product, each addition and, times the other side's largest, each
    entry: ``4 T 2^-126 2^13`` a coordinate.
    """
    if wide:
        error, underflow = gamma(a.time + 8, U64), 0.0
    else:
        error, underflow = gamma(a.time + 6, U32), 4 * a.time * math.sqrt(a.width * e.width) * TINY * 2.0 ** (RANGE + 1)
        underflow *= 1.0 if scale is None else float(np.abs(scale).max(initial=0.0))
    rounding: Wide = error * terms + underflow
    return rounding
