"""Weights of linear maps: norms of ``sum_t e_t a_t^T`` without forming it for all examples, and weighted sums."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from dpcore.spec.check_pairs import check_linear, check_sum
from dpcore.spec.rounding import SUM_ROWS
from dpcore_numpy.pairs import RANGE, TINY, U32, U64, Bound, Floats, Indices, Side, Wide, bounded, gamma

# Up to so many rows an example, norms are by float64 inner products; from so many on, sums are by float32 tiles.
_FEW, _MANY = 8, 24
# Rows and columns of a tile: 256 KiB of float32. Entries of a piece in float64; columns of a float32 inner product.
_TILE, _PIECE, _COLUMNS = 256, 1 << 18, 128
_WIDE_ROWS, _WIDE_COLUMNS = 512, 1024
_RUN = 256  # entries of a tile whose squares are added in float32


def linear_norms(
    inputs: Sequence[Floats],
    gradients: Sequence[Floats],
    point_weights: Sequence[float],
    *,
    scale: Floats | None = None,
    gram: bool = False,
    exact: bool = False,
) -> Wide:
    """See `dpcore.spec.pair_ops.PairOperations.linear_norms`."""
    check_linear(inputs, gradients, point_weights, scale)
    with np.errstate(all="ignore"):  # a warning would tell of one example
        norms, rounding, terms = linear_bound(Side(inputs), Side(gradients, point_weights), scale, gram, exact)
        return bounded(norms + rounding, terms)


def linear_bound(a: Side, e: Side, scale: Floats | None = None, gram: bool = False, exact: bool = False) -> Bound:
    """Return the parts of `linear_norms`.

    Notes
    -----
    Let S be the sum of the terms' norms ``sum_t |a_t| |e_t|`` (times the scale), u the unit roundoff of the arithmetic.
    A product over T rows, whatever the order of its additions, rounds a coordinate by at most gamma_{T+3} times the sum
    of its terms' sizes (weights round e_t twice), so that the vector moves by gamma_{T+3} S at most.
    """
    wide = exact or a.double
    if a.time <= _FEW:
        norms, terms = _few(a, e, scale)
    elif gram and scale is None:
        norms, terms = _gram_wide(a, e) if wide else _gram_narrow(a, e)
    else:
        norms, terms = _tiles(a, e, scale, wide)
    rounding = _rounding(a, e, scale, terms, wide or a.time < _MANY)
    unit, exponents = abs(e.unit) * (1 + 8 * U64), a.measured[0] + e.measured[0]
    # One subnormal number for the last rounding, where the result is not 0.
    return Bound(*(np.ldexp(x * unit, exponents) + 5e-324 * (x > 0) for x in (norms, rounding, terms)))


def _rounding(a: Side, e: Side, scale: Floats | None, terms: Wide, wide: bool) -> Wide:
    """Return how far a product over T rows may be off.

    In float32 underflow adds at most 2^-126 for each product, each addition and, times the other side's largest, each
    entry: ``4 T 2^-126 2^13`` a coordinate.
    """
    if wide:
        return gamma(a.time + 4, U64) * terms
    underflow = 4 * a.time * math.sqrt(a.width * e.width) * TINY * 2.0 ** (RANGE + 1)
    largest = 1.0 if scale is None else float(np.abs(scale).max(initial=0.0))
    return gamma(a.time + 3, U32) * terms + underflow * largest * (terms != 0)


def _pieces(a: Side, e: Side) -> Iterator[slice]:
    """Yield examples whose rows, in float64, stay in the processor's cache."""
    count = max(1, _PIECE // max(1, a.time * max(a.width, e.width)))
    for first in range(0, a.examples, count):
        yield slice(first, first + count)


def _few(a: Side, e: Side, scale: Floats | None) -> tuple[Wide, Wide]:
    """Return norms and S of few rows, by float64 products of pairs of rows.

    With D the squared scale, ``|v|^2 = sum_{s,t} (e_s e_t)^T D (a_s a_t)``. Each inner product rounds by gamma times
    the product of the norms, so that their sum is off by at most ``gamma_{p + q + T^2 + 10} S^2``.
    """
    if scale is None:
        return _gram_wide(a, e)
    norms, terms = np.empty(a.examples), np.empty(a.examples)
    squared = np.square(scale, dtype=np.float64).reshape(e.width, a.width)
    for chosen in _pieces(a, e):
        x, y = a.wide(chosen), e.wide(chosen)
        square, size = np.zeros(len(x)), np.zeros(len(x))
        for s in range(a.time):
            for t in range(s, a.time):
                product = np.vecdot((y[:, s] * y[:, t]) @ squared, x[:, s] * x[:, t])
                square += product if s == t else 2 * product
                size += np.sqrt(product) if s == t else 0
        size *= 1 + gamma(a.width + e.width + 10, U64)
        norms[chosen], terms[chosen] = _root(square, size, gamma(a.width + e.width + a.time**2 + 10, U64)), size
    return norms, terms


def _root(square: Wide, terms: Wide, error: float) -> Wide:
    """Return the root of a computed square that is off by `error` times the square of `terms`."""
    root: Wide = np.sqrt(np.maximum(square, 0) + error * np.square(terms))
    return root


def _terms(a: Side, e: Side) -> Wide:
    """Return S, not scaled."""
    return np.vecdot(np.sqrt(a.measured[1]), np.sqrt(e.measured[1])) * (1 + gamma(a.time + 4, U64))


def _gram_wide(a: Side, e: Side) -> tuple[Wide, Wide]:
    """Return norms and S by float64 inner products of rows; the rounding is that of `_few`."""
    square, terms = np.empty(a.examples), _terms(a, e)
    for chosen in _pieces(a, e):
        x, y = a.wide(chosen), e.wide(chosen)
        products = (x @ x.swapaxes(1, 2)) * (y @ y.swapaxes(1, 2))
        square[chosen] = products.sum(axis=(1, 2))
    return _root(square, terms, gamma(a.width + e.width + a.time**2 + 10, U64)), terms


def _gram_narrow(a: Side, e: Side) -> tuple[Wide, Wide]:
    """Return norms and S by float32 inner products of at most 128 columns, added in float64.

    With g = gamma_{130} in float32 an inner product of two rows is off by at most g times the product of their norms
    (the entries may have been rounded twice: 4 more), and by n 2^-125 where products underflow. So the product of the
    two is off by at most ``(2 g + g^2) |a_s| |a_t| |e_s| |e_t|``, the sum by ``(2 g + g^2) S^2``; underflow adds at
    most ``T (p + q) 2^-125`` times the largest possible sum of squares, ``2^26``.
    """
    square, terms = np.empty(a.examples), _terms(a, e)
    for i in range(a.examples):
        square[i] = np.vdot(_inner(a.narrow(i)), _inner(e.narrow(i)))
    g = gamma(_COLUMNS + 8, U32) + gamma(a.width + e.width + a.time**2 + 10, U64)
    underflow = a.time * (a.width + e.width) * TINY * 2.0 ** (2 * RANGE + 4)
    return np.sqrt(np.maximum(square, 0) + (2 * g + g * g) * np.square(terms) + underflow * (terms != 0)), terms


def _inner(rows: Floats) -> Wide:
    """Return the inner products of all rows: (T, T)."""
    total, piece = np.zeros((len(rows), len(rows))), np.empty((len(rows), len(rows)), np.float32)
    for first in range(0, rows.shape[1], _COLUMNS):
        columns = rows[:, first : first + _COLUMNS]
        total += np.matmul(columns, columns.T, out=piece)
    return total


def _blocks(a: Side, e: Side, height: int = _TILE, width: int = _TILE) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of pieces of the matrix."""
    for row in range(0, e.width, height):
        for column in range(0, a.width, width):
            yield slice(row, min(row + height, e.width)), slice(column, min(column + width, a.width))


def _tiles(a: Side, e: Side, scale: Floats | None, wide: bool) -> tuple[Wide, Wide]:
    """Return norms and S by tiles of each example's matrix, squared and added.

    A float32 tile is off as `linear_bound` says. Squares are added in float32 over runs of 256, so that they are off by
    gamma_256 of themselves and by 2^-126 each where they underflow; in float64 where they are scaled.
    """
    squares, terms = np.zeros(a.examples), _terms(a, e) if scale is None else _scaled_terms(a, e, scale, wide)
    scratch = np.empty(_TILE * _TILE, np.float64 if wide else np.float32)
    for rows, columns in _blocks(a, e):
        factor = None if scale is None else scale.reshape(e.width, a.width)[rows, columns].astype(np.float64)
        for i in range(a.examples):
            tile = _tile(a, e, i, rows, columns, scratch)
            squares[i] += _sum_of_squares((tile if factor is None else tile * factor).reshape(-1))
    lost = 0.0 if wide else a.width * e.width * TINY
    u = U64 if wide or scale is not None else U32
    norms = np.sqrt(squares * (1 + 2 * gamma(_RUN + 8, u)) + lost * (terms != 0))
    return norms + _rounding(a, e, scale, terms, wide), terms


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
    """Return the sum of squares, by runs that are added in float64."""
    whole = len(values) // _RUN * _RUN
    runs, rest = values[:whole].reshape(-1, _RUN), values[whole:]
    return float(np.vecdot(runs, runs).sum(dtype=np.float64)) + float(np.vecdot(rest, rest))


def _scaled_terms(a: Side, e: Side, scale: Floats, wide: bool) -> Wide:
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
    for rows, columns_ in _blocks(a, e):
        squared = np.square(scale.reshape(e.width, a.width)[rows, columns_], dtype=np.float64)
        total += np.vecdot(y[:, rows] @ squared, x[:, columns_])
    terms: Wide = np.sqrt(total) * (1 + 2.0**-20)
    return terms


def linear_sum(
    inputs: Sequence[Floats],
    gradients: Sequence[Floats],
    point_weights: Sequence[float],
    weights: Floats,
    out: Floats,
    *,
    scale: Floats | None = None,
    exact: bool = False,
) -> None:
    """See `dpcore.spec.pair_ops.PairOperations.linear_sum`."""
    check_linear(inputs, gradients, point_weights, scale)
    a, e = Side(inputs), Side(gradients, point_weights)
    check_sum(a.examples, a.width * e.width, weights, out)
    total, used = out.reshape(e.width, a.width), np.flatnonzero(weights)
    factor = None if scale is None else scale.reshape(e.width, a.width)
    with np.errstate(all="ignore"):
        if exact or a.double or a.time < _MANY:
            _add_wide(a, e, weights.astype(np.float64), used, total, factor)
        else:
            _add_tiles(a, e, weights.astype(np.float64), used, total, factor)


def _add_wide(a: Side, e: Side, weights: Wide, used: Indices, total: Wide, scale: Floats | None) -> None:
    """Add float64 products over whole examples, at most `SUM_ROWS` rows or one example at a time."""
    count = max(1, SUM_ROWS // max(1, a.time))
    scratch = np.empty(_WIDE_ROWS * _WIDE_COLUMNS)
    for first in range(0, len(used), count):
        chosen = used[first : first + count]
        x = a.wide(chosen, normalized=False).reshape(len(chosen) * a.time, a.width)
        y = e.wide(chosen, normalized=False, factors=weights[chosen] * e.unit).reshape(len(x), e.width)
        for rows, columns in _blocks(a, e, _WIDE_ROWS, _WIDE_COLUMNS):
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            piece = np.matmul(y[:, rows].T, x[:, columns], out=scratch[: shape[0] * shape[1]].reshape(shape))
            if scale is not None:
                piece *= scale[rows, columns]
            total[rows, columns] += piece


def _add_tiles(a: Side, e: Side, weights: Wide, used: Indices, total: Wide, scale: Floats | None) -> None:
    """Add float32 products over one example's rows each, weighted and added in float64."""
    factors = np.ldexp(weights * e.unit, a.measured[0] + e.measured[0])
    scratch, product = np.empty(_TILE * _TILE, np.float32), np.empty(_TILE * _TILE)
    for rows, columns in _blocks(a, e):
        piece = np.zeros((rows.stop - rows.start, columns.stop - columns.start))
        weighted = product[: piece.size].reshape(piece.shape)
        for i in used:
            tile = _tile(a, e, i, rows, columns, scratch)
            piece += np.multiply(tile, factors[i], out=weighted, dtype=np.float64)
        total[rows, columns] += piece if scale is None else piece * scale[rows, columns]
