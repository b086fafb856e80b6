"""Norms of ``sum_t e_t a_t^T`` by inner products of rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpcore_numpy.pairs import RANGE, TINY, U32, U64, Floats, Side, Wide, gamma, terms_of

# Entries of a piece in float64; columns of a float32 inner product.
_PIECE, _COLUMNS = 1 << 18, 256


def _pieces(a: Side, e: Side) -> Iterator[slice]:
    """Yield examples whose rows, in float64, stay in the processor's cache."""
    count = max(1, _PIECE // max(1, a.time * max(a.width, e.width)))
    for first in range(0, a.examples, count):
        yield slice(first, first + count)


def few(a: Side, e: Side, scale: Floats) -> tuple[Wide, Wide]:
    """Return norms and S of few rows under a scale, by float64 products of pairs of rows.

    With D the squared scale, ``|v|^2 = sum_{s,t} (e_s e_t)^T D (a_s a_t)``. Each inner product rounds by gamma times
    the product of the norms, so that their sum is off by at most ``gamma_{p + q + T^2 + 10} S^2``.
    """
    norms, terms = np.empty(a.examples), np.empty(a.examples)
    squared = np.square(scale, dtype=np.float64).reshape(e.width, a.width)
    for chosen in _pieces(a, e):
        x, y = a.wide(chosen), e.wide(chosen)
        square, size = np.zeros(len(x)), np.zeros(len(x))
        for s in range(a.time):
            for t in range(s, a.time):
                # One example after the other: the rounding of a product over several may depend on their number.
                weighed = np.concatenate([np.matmul(row[None], squared) for row in y[:, s] * y[:, t]])
                product = np.vecdot(weighed, x[:, s] * x[:, t])
                square += product if s == t else 2 * product
                size += np.sqrt(product) if s == t else 0
        size *= 1 + gamma(a.width + e.width + 10, U64)
        norms[chosen], terms[chosen] = _root(square, size, gamma(a.width + e.width + a.time**2 + 10, U64)), size
    return norms, terms


def _root(square: Wide, terms: Wide, error: float) -> Wide:
    """Return the root of a computed square that is off by `error` times the square of `terms`."""
    root: Wide = np.sqrt(np.maximum(square, 0) + error * np.square(terms))
    return root


def gram_wide(a: Side, e: Side) -> tuple[Wide, Wide]:
    """Return norms and S by float64 inner products of rows; the rounding is that of `few`."""
    square, terms = np.empty(a.examples), terms_of(a, e)
    for chosen in _pieces(a, e):
        x, y = a.wide(chosen), e.wide(chosen)
        products = np.matmul(x, x.swapaxes(1, 2)) * np.matmul(y, y.swapaxes(1, 2))
        square[chosen] = products.sum(axis=(1, 2))
    return _root(square, terms, gamma(a.width + e.width + a.time**2 + 10, U64)), terms


def gram_narrow(a: Side, e: Side) -> tuple[Wide, Wide]:
    """Return norms and S by float32 inner products of at most 256 columns, added in float64.

    With g = gamma_264 in float32 an inner product of two rows is off by at most g times the product of their norms (an
    entry may have been rounded twice: 4 more), and by n 2^-125 where products underflow. With A and E the computed
    inner products the sum is off by at most ``g sum_{s,t} (|a_s| |a_t| |E_st| + |e_s| |e_t| |A_st|) + g^2 S^2``: much
    less than ``2 g S^2`` where rows are far from parallel. Underflow adds at most ``T (p + q) 2^-125`` times the
    largest possible sum of squares, ``2^26``.
    """
    square, off, terms = np.empty(a.examples), np.empty(a.examples), terms_of(a, e)
    for i in range(a.examples):
        x, y = np.sqrt(a.measured[1][i]), np.sqrt(e.measured[1][i])
        inputs, gradients = _inner(a.narrow(i)), _inner(e.narrow(i))
        square[i] = np.vdot(inputs, gradients)
        off[i] = x @ np.abs(gradients) @ x + y @ np.abs(inputs) @ y
    return narrow_root(a, e, square, off, terms), terms


def narrow_root(a: Side, e: Side, square: Wide, off: Wide, terms: Wide, columns: int = _COLUMNS) -> Wide:
    """Return the bound of `gram_narrow` on the root of a computed square; `off` is the sum in its rounding."""
    g = gamma(min(columns, max(a.width, e.width)) + 8, U32) + gamma(a.width + e.width + a.time**2 + 10, U64)
    underflow = a.time * (a.width + e.width) * TINY * 2.0 ** (2 * RANGE + 4)
    root: Wide = np.sqrt(np.maximum(square, 0) + g * (1 + g) * off + g * g * np.square(terms) + underflow)
    return root


def _inner(rows: Floats) -> Wide:
    """Return the inner products of all rows: (T, T)."""
    total, piece = np.zeros((len(rows), len(rows))), np.empty((len(rows), len(rows)), np.float32)
    for first in range(0, rows.shape[1], _COLUMNS):
        columns = rows[:, first : first + _COLUMNS]
        total += np.matmul(columns, columns.T, out=piece)
    return total
