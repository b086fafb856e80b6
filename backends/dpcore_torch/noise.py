"""Standard normals on a grid: `dpcore_numpy.noise` in torch's threads."""

from __future__ import annotations

from collections.abc import Callable
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

_COLUMNS, _STAIRS, _PLACES = 2**COLUMN_BITS - 1, 2**STAIR_BITS, 2**FINE_BITS - 1
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
    first, last = start // TILE, -(-(start + size) // TILE)
    w0, w1 = (
        torch.from_numpy(tile_blocks(key, row, stream, first, last - first, part=part, rng=rng).view(np.int32))
        for part in (0, 1)
    )
    z, region = (numbers_of or numbers)(w0, w1, _columns())
    flat = z.view(-1).numpy()
    for found in np.flatnonzero(region.numpy() == REST).tolist():
        block, word = divmod(found, WORDS_PER_BLOCK)
        k = of_rest(key, row, stream, first * LANES + block, word, rng)
        flat[found] = -1 - k if flat[found] < 0 else k
    if bits < FRACTION_BITS:
        z.mul_(2.0 ** (bits - FRACTION_BITS)).floor_()
    return z.mul_(2.0**-bits).transpose(1, 2).reshape(-1)[start - first * TILE :][:size]


def numbers(w0: torch.Tensor, w1: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return floor(2^36 Z) in float64, and the region, by `dpcore_numpy.noise.size_of`; for `REST` it is not right.

    Words are int32 of the same bits, and shifts keep the sign. w0 is overwritten.
    """
    own = w0 & _COLUMNS
    column = columns.index_select(0, own.view(-1)).view(own.shape)
    below = (w0 & _THRESHOLDS).sub_(column & ~_COLUMNS).bitwise_right_shift_(31)
    region = column.bitwise_and_(_COLUMNS)
    region ^= own.bitwise_xor_(region).bitwise_and_(below)
    # Memory that was just used lies in the cache: results overwrite values no longer needed.
    t = torch.bitwise_right_shift(w0, THRESHOLD_BITS + COLUMN_BITS - 2, out=own).bitwise_and_(_STAIRS - 4)
    t += torch.bitwise_and(w1, 3, out=below)
    t += torch.bitwise_right_shift(w1, 2 + FINE_BITS - STAIR_BITS, out=below).bitwise_and_(_STAIRS - 1)
    # The sign of 510 - t, if the region's lowest bit, moved to the sign's place, is set.
    turned = torch.rsub(t, _STAIRS - 2)
    turned.bitwise_and_(torch.bitwise_left_shift(region, 31, out=t)).bitwise_right_shift_(31)
    # -1 - k has the strip -1 - strip, and every bit of the place inverted.
    sign = w0.bitwise_right_shift_(31)
    place = torch.bitwise_right_shift(w1, 2, out=below)
    place ^= turned.bitwise_xor_(sign)
    strip = torch.bitwise_right_shift(region, 1, out=t).bitwise_xor_(sign)
    return place.bitwise_and_(_PLACES).double().add_(strip, alpha=2.0**FINE_BITS), region


@lru_cache(maxsize=1)
def _columns() -> torch.Tensor:
    """Return each column's threshold, at its place in a word, with the region beyond it in the lowest bits."""
    return torch.from_numpy(tables().columns.view(np.int32).copy())
