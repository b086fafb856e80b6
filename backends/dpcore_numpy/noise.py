"""Standard normals from the random stream, by Box-Muller with a refined tail (`dpcore.spec.ops.Backend.normal`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.stream import TILE
from dpcore.validate import choice
from dpcore_numpy.stream import Words, tile_words

Floats = NDArray[Any]
Mask = NDArray[Any]

TAIL_BOUND = 4096


def normal(
    key: bytes, row: int, stream: int, start: int, size: int, *, dtype: str = "float32", rng: str = "chacha20"
) -> Floats:
    """See `dpcore.spec.ops.Backend.normal`. float64 is the definition."""
    choice(("float32", "float64"), dtype=dtype)
    first, last = start // TILE, -(-(start + size) // TILE)
    tiles = tile_words(key, row, stream, first, last - first, rng=rng)
    w0, w1 = np.ascontiguousarray(tiles[:, 0::2]), np.ascontiguousarray(tiles[:, 1::2])
    log_u = _log_uniform(w0, dtype)
    for tile in np.flatnonzero((w0 < TAIL_BOUND).any(axis=(1, 2))):
        w_tail = tile_words(key, row, stream, first + int(tile), 1, tail=True, rng=rng)[0, 0::2]
        _refine_tail(log_u[tile], w0[tile], w_tail)
    rho = np.sqrt(-2 * log_u)
    cosine, sine = _cosine_sine(w1, dtype)
    z = np.empty(tiles.shape, dtype=dtype)
    np.multiply(rho, cosine, out=z[:, 0::2])
    np.multiply(rho, sine, out=z[:, 1::2])
    return z.reshape(-1)[start - first * TILE :][:size]


def _log_uniform(w0: Words, dtype: str) -> Floats:
    """Return ln u of the middle of the w0-th of 2^32 cells, from the nearer end so that no digit is lost next to 1."""
    upper = _mask(w0 >> 31, dtype)
    from_end = (w0 ^ upper.astype(np.uint32)).astype(dtype)
    v = (from_end + np.asarray(0.5, dtype)) * np.asarray(2.0**-32, dtype)
    return _choose(upper, np.log1p(-v), np.log(v))


def _refine_tail(log_u: Floats, w0: Words, w_tail: Words) -> None:
    """Cut each of the 4096 lowest cells into 2^32 and replace ln u there, in place."""
    low = w0 < TAIL_BOUND
    u = (w0[low] + (w_tail[low] + 0.5) * 2.0**-32) * 2.0**-32
    log_u[low] = np.log(u)


def _cosine_sine(w1: Words, dtype: str) -> tuple[Floats, Floats]:
    """Return cos and sin of 2 pi w1 2^-32, from an angle in [-pi/4, pi/4] and the quadrant that it was taken out of."""
    k = (w1 + np.uint32(2**29)) >> 30
    f = (w1 - (k << 30)).view(np.int32)
    angle = f.astype(dtype) * np.asarray(2 * np.pi * 2.0**-32, dtype)
    c, s = np.cos(angle), np.sin(angle)
    swapped = _mask(k & 1, dtype)
    cosine = _negate(_mask(((k + 1) >> 1) & 1, dtype), _choose(swapped, s, c))
    sine = _negate(_mask(k >> 1, dtype), _choose(swapped, c, s))
    return cosine, sine


# Selecting by bit masks: np.where on random conditions is ten times as slow, for its branches are never predicted.


def _mask(bit: NDArray[Any], dtype: str) -> Mask:
    """Return all ones where `bit` is 1 and all zeros where it is 0, as wide as `dtype`."""
    ones: NDArray[np.int32] = -bit.view(np.int32)
    return ones.astype(np.int32 if dtype == "float32" else np.int64, copy=False)


def _choose(mask: Mask, a: Floats, b: Floats) -> Floats:
    """Return `a` where `mask` is ones, else `b`."""
    a_bits, b_bits = a.view(mask.dtype), b.view(mask.dtype)
    chosen: Floats = (b_bits ^ ((a_bits ^ b_bits) & mask)).view(a.dtype)
    return chosen


def _negate(mask: Mask, a: Floats) -> Floats:
    """Return `-a` where `mask` is ones, else `a`."""
    negated: Floats = (a.view(mask.dtype) ^ (mask & np.iinfo(mask.dtype).min)).view(a.dtype)
    return negated
