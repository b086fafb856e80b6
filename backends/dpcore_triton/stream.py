"""Words of the random stream: ChaCha20 (RFC 8439) and Philox4x32-10, cut as `dpcore.spec.stream` says."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import struct

import torch
import triton.language as tl

from dpcore.spec import stream as spec
from dpcore.spec.stream import check_key, check_range
from dpcore_triton.launch import BLOCKS, default_device, jit, kernel, launch, table

LANES = tl.constexpr(spec.LANES)
TILE = tl.constexpr(spec.TILE)

# Key and stream are kernel arguments: they are in constant memory, cost no register, and no copy of the key stays in
# recycled device memory. (The fused step reads its row from memory.)
CIPHER = ("k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "noise_row", "noise_stream", "one")


def words(
    key: bytes, row: int, stream: int, start: int, size: int, *, part: int = 0, rng: str = "chacha20"
) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.words`."""
    device = default_device()
    cipher = cipher_words(key, row, stream, start, size, rng)
    out = torch.empty(size, dtype=torch.int32, device=device)
    rows, row_of, programs = table([(start, size, out.data_ptr())], [programs_of(start, size)], device)
    bits = struct.unpack("<i", struct.pack("<I", part))
    launch(_words_kernel, (programs,), device, rows, row_of, *cipher, *bits, RNG=rng, BLOCKS=BLOCKS)
    return out.view(torch.uint32)


def cipher_words(key: bytes, row: int, stream: int, start: int, size: int, rng: str) -> tuple[int, ...]:
    """Return key, row, stream and 1 for kernels: as bits of signed integers, so that their type never changes."""
    check_key(key)
    check_range(row, stream, start, size, rng)
    return *struct.unpack("<10i", key + struct.pack("<II", row, stream)), 1


def programs_of(first: int, size: int) -> int:
    """Return how many programs compute the elements `first` .. `first + size`, in whole tiles."""
    tiles = -(-(first + size) // spec.TILE) - first // spec.TILE if size else 0
    return -(-tiles * spec.LANES // BLOCKS)


@kernel(*CIPHER, "part")
def _words_kernel(
    rows, row_of, k0, k1, k2, k3, k4, k5, k6, k7, noise_row, noise_stream, one, part,
    RNG: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    cipher = (k0, k1, k2, k3, k4, k5, k6, k7, noise_row, noise_stream, one)
    row, start = locate(rows, row_of, 4, BLOCKS)
    place, low, high, origin = places(row, start, BLOCKS)
    block = cipher_block(cipher, counters(row, start, BLOCKS), part, RNG)
    out = tl.load(row + 3).to(tl.pointer_type(tl.uint32)) + (origin + place)
    store_words(out, block, place, low, high, BLOCKS)


# A row of the table begins with: first program, first element, number of elements. A tensor's blocks are counted from
# the start of the tile with its first element; `start` is the first of a program's blocks. A program may take part of a
# tile, a tile or several. A place is an element counted from the start of the program's first tile.


@jit
def locate(rows, row_of, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the address of this program's row of the table, and its first block."""
    program = tl.program_id(0)
    row = rows + tl.load(row_of + program).to(tl.int64) * COLUMNS
    return row, (program - tl.load(row)) * BLOCKS


@jit
def counters(row, start, BLOCKS: tl.constexpr):
    """Return the cipher's block counters of a program."""
    return (tl.load(row + 1) // TILE * LANES + start).to(tl.uint32) + tl.arange(0, BLOCKS).to(tl.uint32)


@jit
def places(row, start, BLOCKS: tl.constexpr):
    """Return the place of each block's word 0, the bounds of places in the tensor, and the index of place 0 in it.

    Word w lies ``w * LANES`` places further. The index of place 0 is negative if the tensor begins inside a tile.
    """
    origin = start // LANES * TILE - tl.load(row + 1) % TILE
    low = tl.maximum(-origin, 0).to(tl.int32)
    high = tl.minimum(tl.load(row + 2) - origin, 2**30).to(tl.int32)
    block = (start % LANES).to(tl.int32) + tl.arange(0, BLOCKS)
    return block // LANES * TILE + block % LANES, low, high, origin


@jit
def inside(place, low, high):
    """Return which places lie in the tensor."""
    return (place >= low) & (place < high)


@jit
def load_at(pointer, place, low, high, MASKED: tl.constexpr):
    """Load the elements at places; a mask is needed at a tensor's edge only."""
    if MASKED:
        return tl.load(pointer, mask=inside(place, low, high))
    else:
        return tl.load(pointer)


@jit
def store_at(pointer, values, place, low, high, MASKED: tl.constexpr):
    """Store elements at places."""
    if MASKED:
        tl.store(pointer, values, mask=inside(place, low, high))
    else:
        tl.store(pointer, values)


@jit
def interior(low, high, BLOCKS: tl.constexpr):
    """Return whether all places of a program's tiles lie in the tensor."""
    return (low <= 0) & (high >= (BLOCKS + LANES - 1) // LANES * TILE)


@jit
def store_words(out, values, place, low, high, BLOCKS: tl.constexpr):
    """Store the 16 values of each block, masked at a tensor's edge only."""
    if interior(low, high, BLOCKS):
        for word in tl.static_range(16):
            store_at(out + word * LANES, values[word], place + word * LANES, low, high, False)
    else:
        for word in tl.static_range(16):
            store_at(out + word * LANES, values[word], place + word * LANES, low, high, True)


@jit
def cipher_block(cipher, counter, part, RNG: tl.constexpr):
    """Return the 16 words of the blocks with these counters, of one part or of a part each."""
    if RNG == "philox":
        return philox_block(cipher, counter, part)
    else:
        return chacha20_block(cipher, counter, part)


# The cipher's additions multiply by `one`, an argument whose value 1 is unknown to the compiler. So they become
# multiply-adds, which run on the multipliers' pipe, in parallel with the exclusive ors and rotations.


@jit
def chacha20_block(cipher, counter, part):
    """RFC 8439, section 2.3."""
    zero, one = counter ^ counter, cipher[10].to(tl.uint32, bitcast=True)
    i0, i1, i2, i3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    i4, i5, i6, i7 = fill(zero, cipher[0]), fill(zero, cipher[1]), fill(zero, cipher[2]), fill(zero, cipher[3])
    i8, i9, i10, i11 = fill(zero, cipher[4]), fill(zero, cipher[5]), fill(zero, cipher[6]), fill(zero, cipher[7])
    i12, i13, i14, i15 = counter, fill(zero, cipher[8]), fill(zero, cipher[9]), zero + part
    x0, x1, x2, x3, x4, x5, x6, x7 = i0, i1, i2, i3, i4, i5, i6, i7
    x8, x9, x10, x11, x12, x13, x14, x15 = i8, i9, i10, i11, i12, i13, i14, i15
    for _ in range(10):
        x0, x4, x8, x12 = quarter_round(x0, x4, x8, x12, one)
        x1, x5, x9, x13 = quarter_round(x1, x5, x9, x13, one)
        x2, x6, x10, x14 = quarter_round(x2, x6, x10, x14, one)
        x3, x7, x11, x15 = quarter_round(x3, x7, x11, x15, one)
        x0, x5, x10, x15 = quarter_round(x0, x5, x10, x15, one)
        x1, x6, x11, x12 = quarter_round(x1, x6, x11, x12, one)
        x2, x7, x8, x13 = quarter_round(x2, x7, x8, x13, one)
        x3, x4, x9, x14 = quarter_round(x3, x4, x9, x14, one)
    return (
        x0 * one + i0, x1 * one + i1, x2 * one + i2, x3 * one + i3,
        x4 * one + i4, x5 * one + i5, x6 * one + i6, x7 * one + i7,
        x8 * one + i8, x9 * one + i9, x10 * one + i10, x11 * one + i11,
        x12 * one + i12, x13 * one + i13, x14 * one + i14, x15 * one + i15,
    )  # fmt: skip


@jit
def fill(zero, word):
    """Return the bits of one word in every lane."""
    return zero + word.to(tl.uint32, bitcast=True)


@jit
def quarter_round(a, b, c, d, one):
    """RFC 8439, section 2.1."""
    a = b * one + a
    d ^= a
    d = (d << 16) | (d >> 16)
    c = d * one + c
    b ^= c
    b = (b << 12) | (b >> 20)
    a = b * one + a
    d ^= a
    d = (d << 8) | (d >> 24)
    c = d * one + c
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@jit
def philox_block(cipher, counter, part):
    """Four calls of Philox4x32-10 (Salmon et al. 2011)."""
    w0, w1, w2, w3 = philox(cipher, counter * 4, part)
    w4, w5, w6, w7 = philox(cipher, counter * 4 + 1, part)
    w8, w9, w10, w11 = philox(cipher, counter * 4 + 2, part)
    w12, w13, w14, w15 = philox(cipher, counter * 4 + 3, part)
    return w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15


@jit
def philox(cipher, c0, part):
    """One call: 4 words for counter (c0, row, stream, part), keyed with the first 64 bits of the key."""
    zero = c0 ^ c0
    c1, c2, c3 = fill(zero, cipher[8]), fill(zero, cipher[9]), zero + part
    k0, k1 = fill(zero, cipher[0]), fill(zero, cipher[1])
    m0, m1 = zero + 0xD2511F53, zero + 0xCD9E8D57
    for _ in range(10):
        h0, h1 = tl.umulhi(c0, m0), tl.umulhi(c2, m1)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, c2 * m1, h0 ^ c3 ^ k1, c0 * m0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3
