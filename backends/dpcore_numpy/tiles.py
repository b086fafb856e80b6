"""Norms and sums of ``sum_t e_t a_t^T`` by tiles of each example's matrix, which stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpcore.spec.grid import nearest
from dpcore_numpy.pairs import TINY, U32, U64, Floats, Indices, Side, Wide, factors_of, gamma, rounding_of, terms_of

# Rows and columns of a tile: 256 KiB of float32. Entries of a tile whose squares are added in float32.
_TILE, _RUN = 256, 256


def blocks(a: Side, e: Side) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of pieces of the matrix."""
    for row in range(0, e.width, _TILE):
        for column in range(0, a.width, _TILE):
            yield slice(row, min(row + _TILE, e.width)), slice(column, min(column + _TILE, a.width))


def tile_norms(a: Side, e: Side, scale: Floats | None, wide: bool) -> tuple[Wide, Wide]:
    """Return norms and S by tiles of each example's matrix, squared and added.

    A float32 tile is off as `linear_bound` says. Squares are added in float32 over runs of 256, so they are off by
    gamma_256 of themselves, and by 2^-126 each if they underflow. Scaled squares are added in float64.
    """
    squares, terms = np.zeros(a.examples), terms_of(a, e) if scale is None else scaled_terms(a, e, scale, wide)
    scratch = np.empty(_TILE * _TILE, np.float64 if wide else np.float32)
    for rows, columns in blocks(a, e):
        factor = None if scale is None else scale.reshape(e.width, a.width)[rows, columns].astype(np.float64)
        for i in range(a.examples):
            tile = _tile(a, e, i, rows, columns, scratch)
            squares[i] += _sum_of_squares((tile if factor is None else tile * factor).reshape(-1))
    error, lost = 2 * gamma(a.width * e.width + 8, U64), 0.0
    if not wide and scale is None:
        error, lost = error + 2 * gamma(_RUN + 8, U32), a.width * e.width * TINY
    norms = np.sqrt(squares * (1 + error) + lost)
    return norms + rounding_of(a, e, scale, terms, wide), terms


def _tile(a: Side, e: Side, i: int, rows: slice, columns: slice, scratch: Floats) -> Floats:
    """Return a piece of example i's matrix in the precision of `scratch`, and in its memory."""
    if scratch.dtype == np.float64:
        one = slice(i, i + 1)
        x, y = a.wide(one, columns)[0], e.wide(one, rows)[0]
    else:
        x, y = a.narrow(i, columns), e.narrow(i, rows)
    shape = (y.shape[1], x.shape[1])
    tile: Floats = np.matmul(y.T, x, out=scratch[: shape[0] * shape[1]].reshape(shape))
    return tile


def _sum_of_squares(values: Floats) -> float:
    """Return the sum of squares: runs, which are then added in float64."""
    whole = len(values) // _RUN * _RUN
    runs, rest = values[:whole].reshape(-1, _RUN), values[whole:]
    return float(np.vecdot(runs, runs).sum(dtype=np.float64)) + float(np.vecdot(rest, rest))


def scaled_terms(a: Side, e: Side, scale: Floats, wide: bool) -> Wide:
    """Return a bound on the norm of the scaled sum of the terms' sizes.

    By Cauchy and Schwarz over time it is at most ``|D (y x^T)|`` with x and y the norms of the two sides' columns: at
    most sqrt(T) too large, and less the more alike the rows are.
    """
    columns = []
    for side in (a, e):
        squares = np.empty((side.examples, side.width))
        for i in range(side.examples):
            rows = side.wide(slice(i, i + 1))[0] if wide else side.narrow(i)
            np.einsum("tn,tn->n", rows, rows, dtype=np.float64, out=squares[i])
        columns.append(squares)
    x, y = columns
    total = np.zeros(a.examples)
    for rows, columns_ in blocks(a, e):
        squared = np.square(scale.reshape(e.width, a.width)[rows, columns_], dtype=np.float64)
        total += np.vecdot(y[:, rows] @ squared, x[:, columns_])
    terms: Wide = np.sqrt(total) * (1 + 2.0**-20)
    return terms


def add_tiles(a: Side, e: Side, weights: Wide, used: Indices, total: Wide, scale: Floats | None, wide: bool) -> None:
    """Add products over one example's rows each, in float32 or float64, scaled, weighted and rounded in float64."""
    factors = factors_of(a, e, weights)
    scratch = np.empty(_TILE * _TILE, np.float64 if wide else np.float32)
    for rows, columns in blocks(a, e) if len(used) else ():
        piece = np.zeros((rows.stop - rows.start, columns.stop - columns.start))
        for i in used:
            v = _tile(a, e, i, rows, columns, scratch).astype(np.float64)
            if scale is not None:
                v *= scale[rows, columns]
            piece += nearest(factors[i] * v)
        total[rows, columns] += piece
