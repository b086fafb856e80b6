"""Standard normals on a grid: `dpcore_numpy.noise` in torch's threads."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from dpcore.spec.check import check_bits
from dpcore.spec.rounded_normal import (
    COLUMN_BITS,
    FINE_BITS,
    FRACTION_BITS,
    REST,
    STAIR_BITS,
    THRESHOLD_BITS,
    tables,
)
from dpcore.spec.stream import LANES, TILE, WORDS_PER_BLOCK
from dpcore_numpy.noise import of_rest
from dpcore_numpy.stream import tile_blocks

_COLUMNS, _THRESHOLDS, _STAIRS = 2**COLUMN_BITS - 1, 2 ** (THRESHOLD_BITS + COLUMN_BITS) - 1, 2**STAIR_BITS
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
) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.normal`."""
    check_bits(bits)
    first, last = start // TILE, -(-(start + size) // TILE)
    w0, w1 = (
        torch.from_numpy(tile_blocks(key, row, stream, first, last - first, part=part, rng=rng).view(np.int32))
        for part in (0, 1)
    )
    strip, place, region = parts_of(w0, w1)
    z = strip.double().mul_(2.0**FINE_BITS).add_(place)
    numbers = z.view(-1).numpy()
    for found in np.flatnonzero(region.numpy() == REST).tolist():
        block, word = divmod(found, WORDS_PER_BLOCK)
        k = of_rest(key, row, stream, first * LANES + block, word, rng)
        numbers[found] = -1 - k if numbers[found] < 0 else k
    if bits < FRACTION_BITS:
        z.mul_(2.0 ** (bits - FRACTION_BITS)).floor_()
    return z.mul_(2.0**-bits).transpose(1, 2).reshape(-1)[start - first * TILE :][:size]


def parts_of(w0: torch.Tensor, w1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return strip and place of floor(2^36 Z), ``2^30 strip + place``, and the region, by `dpcore_numpy.noise.size_of`.

    Words are int32 of the same bits, and shifts keep the sign. w0 is overwritten.
    """
    own = w0 & _COLUMNS
    threshold, region = (table.index_select(0, own.view(-1)).view(own.shape) for table in _columns())
    below = (w0 & _THRESHOLDS).sub_(threshold).bitwise_right_shift_(31)
    region ^= own.bitwise_xor_(region).bitwise_and_(below)
    t = (w0 >> THRESHOLD_BITS + COLUMN_BITS - 2).bitwise_and_(_STAIRS - 4).bitwise_or_(w1 & 3)
    place = w1 >> 2
    t += (place >> FINE_BITS - STAIR_BITS).bitwise_and_(_STAIRS - 1)
    turned = torch.rsub(t, _STAIRS - 2).bitwise_and_((region & 1).neg_()).bitwise_right_shift_(31)
    # -1 - k has the strip -1 - strip, and every bit of the place turned round.
    sign = w0.bitwise_right_shift_(31)
    place ^= turned.bitwise_xor_(sign)
    return (region >> 1).bitwise_xor_(sign), place.bitwise_and_(_PLACES), region


@lru_cache(maxsize=1)
def _columns() -> tuple[torch.Tensor, torch.Tensor]:
    """Return each column's threshold, where it stands in a word, and the region beyond it."""
    columns = torch.from_numpy(tables().columns.view(np.int32).copy())
    return columns & ~_COLUMNS, columns & _COLUMNS
