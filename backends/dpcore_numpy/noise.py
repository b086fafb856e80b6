"""Standard normals from the random stream, by Box-Muller with a refined tail (`dpcore.spec.ops.Backend.normal`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.stream import TILE
from dpcore.spec.validate import choice
from dpcore_numpy.stream import Words, tile_blocks

Floats = NDArray[Any]
Mask = NDArray[Any]

TAIL_BOUND = 4096


def normal(
    key: bytes, row: int, stream: int, start: int, size: int, *, dtype: str = "float32", rng: str = "chacha20"
) -> Floats:
    """See `dpcore.spec.ops.Backend.normal`. float64 is the definition."""
    choice(("float32", "float64"), dtype=dtype)
    first, last = start // TILE, -(-(start + size) // TILE)
    words = tile_blocks(key, row, stream, first, last - first, rng=rng).transpose(0, 2, 1)
    w0, w1 = np.ascontiguousarray(words[:, 0::2]), np.ascontiguousarray(words[:, 1::2])
    log_u = _log_uniform(w0, dtype)
    for tile in np.flatnonzero((w0 < TAIL_BOUND).any(axis=(1, 2))):
        (tail,) = tile_blocks(key, row, stream, first + int(tile), 1, tail=True, rng=rng).transpose(0, 2, 1)
        refine_tail(log_u[tile], w0[tile], tail[0::2])
    log_u *= -2
    rho = np.sqrt(log_u, out=log_u)
    z = np.empty(words.shape, dtype=dtype)
    np.multiply(rho, _sine(w1 + np.uint32(2**30), dtype), out=z[:, 0::2])
    np.multiply(rho, _sine(w1, dtype), out=z[:, 1::2])
    return z.reshape(-1)[start - first * TILE :][:size]


def _log_uniform(w0: Words, dtype: str) -> Floats:
    """Return ln u of the middle of the w0-th of 2^32 cells, from the nearer end so that no digit is lost next to 1."""
    signed = w0.view(np.int32)
    upper = signed >> 31
    v = (signed ^ upper).astype(dtype)
    v += 0.5
    v *= 2.0**-32
    from_zero = np.log(v)
    np.negative(v, out=v)
    from_one = np.log1p(v, out=v)
    chosen: Floats = _choose(_wide(upper, dtype), from_one, from_zero)
    return chosen


def refine_tail(log_u: Floats, w0: Words, w_tail: Words) -> None:
    """Cut each of the 4096 lowest cells into 2^32 and replace ln u there, in place."""
    low = w0 < TAIL_BOUND
    u = (w0[low] + (w_tail[low] + 0.5) * 2.0**-32) * 2.0**-32
    log_u[low] = np.log(u)


def _sine(turn: Words, dtype: str) -> Floats:
    """Return sin of 2 pi turn 2^-32: of the angle to the nearest half turn, negated where that is an odd one.

    Twice the turn, as a signed number, is twice that angle, exactly; its sign differs from the turn's next to odd ones.
    """
    doubled = (turn << 1).view(np.int32)
    angle = doubled.astype(dtype)
    angle *= np.pi * 2.0**-32
    sine: Floats = np.sin(angle, out=angle)
    _negate(doubled ^ turn.view(np.int32), sine)
    return sine


# Selecting and negating by bits: np.where on random conditions is ten times as slow, for its branches are never
# predicted. Integers are 32 or 64 bits wide, as the floating-point numbers that they select.


def _bits(a: Floats) -> Mask:
    """Return the same memory as integers."""
    return a.view(np.int32 if a.dtype == np.float32 else np.int64)


def _wide(mask: NDArray[np.int32], dtype: str) -> Mask:
    """Return a mask of zeros and ones as wide as `dtype`."""
    return mask.astype(np.int32 if dtype == "float32" else np.int64, copy=False)


def _choose(mask: Mask, a: Floats, b: Floats) -> Floats:
    """Return `a` where `mask` is ones, else `b`; in the memory of `b`."""
    difference = _bits(a) ^ _bits(b)
    difference &= mask
    _bits(b)[...] ^= difference
    return b


def _negate(sign: NDArray[np.int32], a: Floats) -> None:
    """Negate `a` in place where `sign` is negative."""
    bits = _bits(a)
    bits ^= _wide(sign, a.dtype.name) & np.iinfo(bits.dtype).min
