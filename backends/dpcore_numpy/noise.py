"""Standard normals on a grid from the random stream, exactly (`dpcore.spec.rounded_normal`)."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.check import check_bits
from dpcore.spec.rounded_normal import (
    COLUMN_BITS,
    FINE_BITS,
    FRACTION_BITS,
    REST,
    STAIR_BITS,
    THRESHOLD_BITS,
    TRIALS,
    rest,
    tables,
)
from dpcore.spec.stream import LANES, TILE, WORDS_PER_BLOCK
from dpcore_numpy.stream import Words, blocks_of, tile_blocks

Floats = NDArray[Any]

_COLUMNS, _THRESHOLDS, _STAIRS = 2**COLUMN_BITS - 1, 2**THRESHOLD_BITS - 1, 2**STAIR_BITS
_PLACES = 2**FINE_BITS - 1


def normal(
    key: bytes,
    row: int,
    stream: int,
    start: int,
    size: int,
    *,
    bits: int = FRACTION_BITS,
    rng: str = "chacha20",
) -> Floats:
    """See `dpcore.spec.ops.Backend.normal`."""
    check_bits(bits)
    first, last = start // TILE, -(-(start + size) // TILE)
    w0, w1 = (tile_blocks(key, row, stream, first, last - first, part=part, rng=rng) for part in (0, 1))
    k, region = size_of(w0, w1)
    for place in np.flatnonzero(region == REST):
        block, word = divmod(int(place), WORDS_PER_BLOCK)
        k.reshape(-1)[place] = of_rest(key, row, stream, first * LANES + block, word, rng)
    z = signed(k, w0, bits).transpose(0, 2, 1).reshape(-1)
    return z[start - first * TILE :][:size]


def size_of(w0: Words, w1: Words) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return k = floor(2^36 |Z|) from an element's first two words, and its region; k is not valid for `REST`."""
    own = (w0 & np.uint32(_COLUMNS)).view(np.int32)
    column = tables().columns.take(own).view(np.int32)
    coarse = (w0 >> np.uint32(COLUMN_BITS)).view(np.int32)
    # Masks of ones and zeros from the sign of a difference: np.where on random conditions is ten times as slow.
    below = ((coarse & _THRESHOLDS) - (column >> COLUMN_BITS)) >> 31
    other = column & _COLUMNS
    region = other ^ ((own ^ other) & below)
    t = ((coarse >> THRESHOLD_BITS) & 127) << 2 | (w1 & np.uint32(3)).view(np.int32)
    place = (w1 >> np.uint32(2)).view(np.int32)
    mirrored = (_STAIRS - 2 - (place >> (FINE_BITS - STAIR_BITS)) - t) >> 31 & -(region & 1)
    place ^= mirrored & _PLACES
    k = (region >> 1).astype(np.int64)
    k <<= FINE_BITS
    k |= place
    return k, region


def signed(k: NDArray[np.int64], w0: Words, bits: int) -> Floats:
    """Return floor(2^bits Z) 2^-bits: k with the sign that is the first word's highest bit, in place."""
    k ^= w0.view(np.int32) >> 31
    k >>= FRACTION_BITS - bits
    z = k.astype(np.float64)
    z *= 2.0**-bits
    return z


@lru_cache(maxsize=1)
def _ends_and_hats() -> tuple[list[int], list[float]]:
    # Python's own numbers: for one element NumPy's are ten times as slow.
    return tables().ends.tolist(), tables().numbers[1].tolist()


def of_rest(key: bytes, row: int, stream: int, block: int, word: int, rng: str) -> int:
    """Return k of an element whose first words chose `REST`, by rejection from blocks of its own."""
    ends, hats = _ends_and_hats()
    attempt = 0
    while True:
        (words,) = blocks_of(key, block, 1, (row, int(stream), 2 + 16 * attempt + word), rng).tolist()
        for trial in range(TRIALS):
            w = words[5 * trial : 5 * trial + 5]
            strip = bisect_right(ends, (w[0] << 32 | w[1]) >> 1)
            place, v = w[2] >> 2, ((w[3] << 32 | w[4]) >> 11) * 2.0**-53
            if strip < len(hats) and v * hats[strip] < rest(strip, place):
                k: int = strip << FINE_BITS | place
                return k
        attempt += 1
