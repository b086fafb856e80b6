"""Standard normals on a grid: `dpcore_numpy.noise` in torch's threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from dpcore.spec.check import check_bits
from dpcore.spec.rounded_normal import COLUMN_BITS, FINE_BITS, FRACTION_BITS, REST, THRESHOLD_BITS, tables
from dpcore.spec.stream import LANES, TILE, WORDS_PER_BLOCK
from dpcore_numpy.noise import of_rest, size_of
from dpcore_numpy.stream import tile_blocks

_COLUMNS, _PLACES = 2**COLUMN_BITS - 1, 2**FINE_BITS - 1
_THRESHOLDS = 2 ** (THRESHOLD_BITS + COLUMN_BITS) - 2**COLUMN_BITS


def normal(
    key: bytes,
    row: int,
    stream: int,
    start: int,
    size: int,
    *,
    bits: int = FRACTION_BITS,
    rng: str = "chacha20",
    numbers_of: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.normal`; `numbers_of` is another function than `numbers`."""
    check_bits(bits)
    return integers(key, row, stream, start, size, bits=bits, rng=rng, numbers_of=numbers_of).mul_(2.0**-bits)


def integers(
    key: bytes,
    row: int,
    stream: int,
    start: int,
    size: int,
    *,
    bits: int,
    rng: str,
    numbers_of: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Return floor(2^bits Z) of the elements of `normal`, in float64."""
    first, last = start // TILE, -(-(start + size) // TILE)
    w0, w1 = (tile_blocks(key, row, stream, first, last - first, part=part, rng=rng) for part in (0, 1))
    v0, v1 = (torch.from_numpy(words.view(np.int32)) for words in (w0, w1))
    z, region = (numbers_of or numbers)(v0, v1, _columns())
    flat = z.view(-1).numpy()
    # One element in 160 is of a staircase or the rest, whose regions are odd: the reference computes these.
    others = np.flatnonzero(region.bitwise_and_(1).view(-1).numpy() != 0)
    first_words = w0.reshape(-1)[others]
    k, regions = size_of(first_words, w1.reshape(-1)[others])
    for place in np.flatnonzero(regions == REST).tolist():
        block, word = divmod(int(others[place]), WORDS_PER_BLOCK)
        k[place] = of_rest(key, row, stream, first * LANES + block, word, rng)
    flat[others] = k ^ (first_words.view(np.int32) >> 31)
    if bits < FRACTION_BITS:
        z.mul_(2.0 ** (bits - FRACTION_BITS)).floor_()
    return z.transpose(1, 2).reshape(-1)[start - first * TILE :][:size]


def numbers(w0: torch.Tensor, w1: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return floor(2^36 Z) in float64, and the region, by `dpcore_numpy.noise.size_of`; right for boxes, even regions.

    Words are int32 of the same bits, and shifts keep the sign.
    """
    own = w0 & _COLUMNS
    column = columns.index_select(0, own.view(-1)).view(own.shape)
    # All ones where the word's threshold is at least the column's: the lowest bits of `column` cannot change the sign.
    region = w0 & _THRESHOLDS
    torch.sub(column, region, out=region).bitwise_right_shift_(31)
    region.bitwise_and_(column).bitwise_and_(_COLUMNS).bitwise_xor_(own)
    # -1 - k has the strip -1 - strip, and every bit of the place inverted.
    # Memory that was just used lies in the cache: results overwrite values no longer needed.
    sign = torch.bitwise_right_shift(w0, 31, out=column)
    place = torch.bitwise_right_shift(w1, 2, out=own).bitwise_xor_(sign).bitwise_and_(_PLACES)
    strip = sign.bitwise_xor_(region >> 1)
    return place.double().add_(strip.double(), alpha=2.0**FINE_BITS), region


@lru_cache(maxsize=1)
def _columns() -> torch.Tensor:
    """Return each column's threshold less one, at its place in a word, and its own region XOR the one beyond."""
    columns = tables().columns.astype(np.int64)
    changed = np.arange(len(columns)) ^ (columns & _COLUMNS)
    return torch.from_numpy((((columns >> COLUMN_BITS) - 1 << COLUMN_BITS) + changed).astype(np.int32))
