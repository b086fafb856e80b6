"""Standard normals on a grid from the random stream, exactly (`dpcore.spec.rounded_normal`).

All but 5 of 100,000 elements take two words and a look into a table of 4 KiB. In nine of ten programs none of the 2,048
elements takes more; in the others every block of the cipher with such elements draws one of them at a time.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton.language as tl

from dpcore.spec import rounded_normal as law
from dpcore.spec.check import check_bits
from dpcore.spec.rounded_normal import FRACTION_BITS
from dpcore_triton.launch import BLOCKS, current_stream, default_device, jit, kernel, launch, table, upload
from dpcore_triton.stream import (
    CIPHER,
    cipher_block,
    cipher_words,
    counters,
    locate,
    places,
    programs_of,
    store_words,
)

COLUMN_BITS, THRESHOLD_BITS = tl.constexpr(law.COLUMN_BITS), tl.constexpr(law.THRESHOLD_BITS)
COLUMNS, THRESHOLDS = tl.constexpr(2**law.COLUMN_BITS - 1), tl.constexpr(2**law.THRESHOLD_BITS - 1)
LAST_STAIR, STAIR_SHIFT = tl.constexpr(2**law.STAIR_BITS - 1), tl.constexpr(law.FINE_BITS - law.STAIR_BITS)
FINE_BITS, PLACES, FRACTION = (
    tl.constexpr(law.FINE_BITS),
    tl.constexpr(2**law.FINE_BITS - 1),
    tl.constexpr(law.FRACTION_BITS),
)
REST, STRIPS, TRIALS = tl.constexpr(law.REST), tl.constexpr(law.STRIPS), tl.constexpr(law.TRIALS)
# Places of the tables in one piece of memory, in units of 4 bytes: columns, ends of hats, and four numbers a strip.
ENDS = tl.constexpr(2**law.COLUMN_BITS)
NUMBERS = tl.constexpr(2**law.COLUMN_BITS + 2 * law.STRIPS)


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
    device = default_device()
    cipher = cipher_words(key, row, stream, start, size, rng)
    out = torch.empty(size, dtype=torch.float64, device=device)
    rows, row_of, programs = table([(start, size, out.data_ptr())], [programs_of(start, size)], device)
    tables = tables_on(device, current_stream(device))
    launch(_normal_kernel, (programs,), device, rows, row_of, tables, *cipher, bits, RNG=rng, BLOCKS=BLOCKS)
    return out.mul_(2.0**-bits)


@lru_cache(maxsize=8)
def tables_on(device: torch.device, stream: int) -> torch.Tensor:
    """Return the tables of the law on a device, as `ENDS` and `NUMBERS` say."""
    del stream  # a copy is ordered with the kernels of its own stream only
    columns, ends, numbers = law.tables()
    return upload(np.concatenate([part.reshape(-1).view(np.int32) for part in (columns, ends, numbers)]), device)


@kernel(*CIPHER, "bits")
def _normal_kernel(
    rows, row_of, tables, k0, k1, k2, k3, k4, k5, k6, k7, noise_row, noise_stream, one, bits,
    RNG: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    cipher = (k0, k1, k2, k3, k4, k5, k6, k7, noise_row, noise_stream, one)
    row, start = locate(rows, row_of, 4, BLOCKS)
    z = normals(cipher, counters(row, start, BLOCKS), tables, bits, RNG)
    place, low, high, origin = places(row, start, BLOCKS)
    out = tl.load(row + 3).to(tl.pointer_type(tl.float64)) + (origin + place)
    store_words(out, z, place, low, high, BLOCKS)


@jit
def normals(cipher, counter, tables, bits, RNG: tl.constexpr):
    """Return floor(2^bits Z) of the 16 elements of a block, float64."""
    w0, w1 = cipher_block(cipher, counter, 0, RNG), cipher_block(cipher, counter, 1, RNG)
    z, pending = (), (counter ^ counter).to(tl.int32)
    negative = pending
    for word in tl.static_range(16):
        k, region = size_of(w0[word], w1[word], tables)
        below = w0[word] >> 31
        z += (signed(k, below != 0, bits),)  # type: ignore[assignment]
        negative |= below.to(tl.int32) << word
        pending |= tl.where(region == REST, 1 << word, 0)
    attempt = pending ^ pending
    while tl.max(pending, axis=0) > 0:
        z, pending, attempt = redrawn(z, negative, pending, attempt, cipher, counter, tables, bits, RNG)
    return z


@jit
def redrawn(z, negative, pending, attempt, cipher, counter, tables, bits, RNG: tl.constexpr):
    """Try to draw each block's first pending element from a block of its own; return what follows."""
    # The place of the lowest bit, by the exponent of a float; -127, which is no word, if none is pending.
    chosen = ((pending & -pending).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    block = cipher_block(cipher, counter, (2 + 16 * attempt + chosen).to(tl.uint32), RNG)
    accepted, k = of_rest(block, tables)
    value = signed(k, ((negative >> (chosen & 15)) & 1) != 0, bits)
    place = tl.where(accepted, chosen, -1)
    drawn = ()
    for word in tl.static_range(16):
        drawn += (tl.where(place == word, value, z[word]),)  # type: ignore[assignment]
    return drawn, tl.where(accepted, pending & (pending - 1), pending), tl.where(accepted, 0, attempt + 1)


@jit
def size_of(w0, w1, tables):
    """Return k = floor(2^36 |Z|) from an element's first two words, and its region; k is not valid for `REST`."""
    own = (w0 & COLUMNS).to(tl.int32)
    column = tl.load(tables + own)
    coarse = (w0 >> COLUMN_BITS).to(tl.int32)
    below = (coarse & THRESHOLDS) < (column >> COLUMN_BITS)
    region = tl.where(below, own, column & COLUMNS)
    t = ((coarse >> THRESHOLD_BITS) & 127) << 2 | (w1 & 3).to(tl.int32)
    place = (w1 >> 2).to(tl.int32)
    mirrored = ((region & 1) != 0) & (t + (place >> STAIR_SHIFT) >= LAST_STAIR)
    place = tl.where(mirrored, place ^ PLACES, place)
    return (region >> 1).to(tl.int64) << FINE_BITS | place.to(tl.int64), region


@jit
def signed(k, negative, bits):
    """Return floor(2^bits Z): k with its sign, rounded down."""
    return (tl.where(negative, -1 - k, k) >> (FRACTION - bits)).to(tl.float64)


@jit
def of_rest(w, tables):
    """Return whether one of a block's trials accepts, and the k of the first that does."""
    accepted, found = w[0] != w[0], (w[0] ^ w[0]).to(tl.int64)
    ends = (tables + ENDS).to(tl.pointer_type(tl.uint64), bitcast=True)
    numbers = (tables + NUMBERS).to(tl.pointer_type(tl.float64), bitcast=True)
    # Loops that are not unrolled: otherwise the compiler would take minutes for their loads.
    for trial in range(TRIALS):
        u = word_of(w, 0, trial).to(tl.uint64) << 32 | word_of(w, 1, trial).to(tl.uint64)
        strip = (w[0] ^ w[0]).to(tl.int32)  # the ends that are not above u
        for k in range(10):
            further = strip + (512 >> k)
            end = tl.load(ends + (tl.minimum(further, STRIPS) - 1))
            strip = tl.where((further <= STRIPS) & (end <= (u >> 1)), further, strip)
        inside = strip < STRIPS
        strip = tl.minimum(strip, STRIPS - 1)
        place = (word_of(w, 2, trial) >> 2).to(tl.int32)
        v = word_of(w, 3, trial).to(tl.uint64) << 32 | word_of(w, 4, trial).to(tl.uint64)
        height = ((v >> 11).to(tl.float64) * 1.1102230246251565e-16) * tl.load(numbers + STRIPS + strip)
        accepts = inside & (height < rest(strip, place, numbers)) & (accepted == 0)
        found = tl.where(accepts, strip.to(tl.int64) << FINE_BITS | place.to(tl.int64), found)
        accepted |= accepts
    return accepted, found


@jit
def word_of(w, k: tl.constexpr, trial):
    """Return the k-th of a trial's five words."""
    return tl.where(trial == 0, w[k], tl.where(trial == 1, w[5 + k], w[10 + k]))


@jit
def rest(strip, place, numbers):
    """See `dpcore.spec.rounded_normal.rest`: the same operations in the same order."""
    stair = (place >> STAIR_SHIFT).to(tl.float64)
    delta = (place.to(tl.float64) + 0.5) * 1.4551915228366852e-11
    e = delta * (strip.to(tl.float64) * 0.015625 + 0.5 * delta)
    series = e * 0.0 + -2.505210838544172e-08
    series = series * e + 2.755731922398589e-07
    series = series * e + -2.7557319223985893e-06
    series = series * e + 2.48015873015873e-05
    series = series * e + -0.0001984126984126984
    series = series * e + 0.001388888888888889
    series = series * e + -0.008333333333333333
    series = series * e + 0.041666666666666664
    series = series * e + -0.16666666666666666
    series = series * e + 0.5
    series = series * e + -1.0
    series = series * e + 1.0
    left, box = tl.load(numbers + strip), tl.load(numbers + 2 * STRIPS + strip)
    step = tl.load(numbers + 3 * STRIPS + strip)
    return left * series - (box + step * (511.5 - stair))
