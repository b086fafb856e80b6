"""Standard normals from the random stream, by Box-Muller with a refined tail (`dpcore.spec.ops.Backend.normal`).

The functions are written out here, in float32, because those of the device are too coarse: its fast logarithm loses all
digits next to 1, where |z| is small. The polynomials were fitted for the least relative error (Lawson's iteration in
float64, tests/unit/backends/test_noise.py measures them), each well under the rounding of float32:

- ``ln(1 + t) = t - t^2/2 + t^3 P(t)`` for 1 + t in [sqrt(1/2), sqrt(2)]: 0.10 units of 2^-24;
- ``sin a = a + a^3 S(a^2)`` and ``cos a = 1 - a^2/2 + a^4 C(a^2)`` for |a| <= pi/4: 0.06 and 0.002 units.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math

import torch
import triton.language as tl

from dpcore.errors import ArgumentError
from dpcore.spec.validate import choice
from dpcore_triton.launch import BLOCKS, default_device, jit, kernel, launch, table
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

TAIL_BOUND = tl.constexpr(4096)
CELL = tl.constexpr(2.0**-32)
RADIANS = tl.constexpr(2 * math.pi * 2.0**-32)
# ln 2 in two parts: the first has so few digits that its product with an exponent is exact.
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(math.log(2) - 0.693359375)


def normal(
    key: bytes, row: int, stream: int, start: int, size: int, *, dtype: str = "float32", rng: str = "chacha20"
) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.normal`. float32 only: float64 is the definition, which the NumPy backend holds."""
    choice(("float32", "float64"), dtype=dtype)
    if dtype == "float64":
        raise ArgumentError("dtype='float64': must be 'float32' under this backend, or use set_backend('numpy')")
    device = default_device()
    cipher = cipher_words(key, row, stream, start, size, rng)
    out = torch.empty(size, dtype=torch.float32, device=device)
    rows, row_of, programs = table([(start, size, out.data_ptr())], [programs_of(start, size)], device)
    launch(_normal_kernel, (programs,), device, rows, row_of, *cipher, RNG=rng, BLOCKS=BLOCKS)
    return out


@kernel(*CIPHER)
def _normal_kernel(
    rows, row_of, k0, k1, k2, k3, k4, k5, k6, k7, noise_row, noise_stream, one, RNG: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    cipher = (k0, k1, k2, k3, k4, k5, k6, k7, noise_row, noise_stream, one)
    row, start = locate(rows, row_of, 4, BLOCKS)
    z = normals(cipher, counters(row, start, BLOCKS), RNG)
    place, low, high, origin = places(row, start, BLOCKS)
    out = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + (origin + place)
    store_words(out, z, place, low, high, BLOCKS)


@jit
def normals(cipher, counter, RNG: tl.constexpr):
    """Return the normals of the 16 elements of a block."""
    w, fraction = normal_words(cipher, counter, RNG)
    z = ()
    for pair in tl.static_range(8):
        z += box_muller(w[2 * pair], w[2 * pair + 1], fraction[pair])
    return z


@jit
def normal_words(cipher, counter, RNG: tl.constexpr):
    """Return a block's words, and for each pair the place of u within its cell: the middle, or refined in the tail.

    A tile reaches the tail once in five hundred times; only then is its second block computed.
    """
    w = cipher_block(cipher, counter, 0, RNG)
    lowest = tl.minimum(
        tl.minimum(tl.minimum(w[0], w[2]), tl.minimum(w[4], w[6])),
        tl.minimum(tl.minimum(w[8], w[10]), tl.minimum(w[12], w[14])),
    )
    middle = counter.to(tl.float32) * 0.0 + 0.5
    fraction = (middle, middle, middle, middle, middle, middle, middle, middle)
    if tl.min(lowest, axis=0) < TAIL_BOUND:
        t = cipher_block(cipher, counter, 1, RNG)
        fraction = (
            refine_tail(w[0], t[0]),
            refine_tail(w[2], t[2]),
            refine_tail(w[4], t[4]),
            refine_tail(w[6], t[6]),
            refine_tail(w[8], t[8]),
            refine_tail(w[10], t[10]),
            refine_tail(w[12], t[12]),
            refine_tail(w[14], t[14]),
        )
    return w, fraction


@jit
def refine_tail(w0, w_tail):
    """Cut each of the 4096 lowest cells into 2^32 and return the middle of the one that `w_tail` says."""
    return tl.where(w0 < TAIL_BOUND, (w_tail.to(tl.float32) + 0.5) * CELL, 0.5)


@jit
def box_muller(w0, w1, fraction):
    """Return the two normals of a pair of words."""
    rho = tl.sqrt(-2.0 * log_uniform(w0, fraction))
    cosine, sine = cosine_sine(w1)
    return rho * cosine, rho * sine


@jit
def log_uniform(w0, fraction):
    """Return ln u for u at `fraction` of the w0-th of 2^32 cells, from the nearer end so that no digit is lost at 1."""
    signed = w0.to(tl.int32, bitcast=True)
    from_end = (signed ^ (signed >> 31)).to(tl.float32)
    v = (from_end + fraction) * CELL
    # u is v or 1 - v, and 2^e (1 + t) with 1 + t in [sqrt(1/2), sqrt(2)). Next to 1 its digits are in v alone.
    bits = tl.where(signed < 0, 1.0 - v, v).to(tl.int32, bitcast=True)
    scaled = (bits - 0x3F3504F3) & ~0x7FFFFF
    t = (bits - scaled).to(tl.float32, bitcast=True) - 1.0
    t = tl.where(scaled == 0, -v, t)

    p = tl.fma(t, -0.07634429633617401, 0.12761549651622772)
    p = tl.fma(t, p, -0.131601944565773)
    p = tl.fma(t, p, 0.14201761782169342)
    p = tl.fma(t, p, -0.16623356938362122)
    p = tl.fma(t, p, 0.20001226663589478)
    p = tl.fma(t, p, -0.250008225440979)
    p = tl.fma(t, p, 0.3333333134651184)
    square, e = t * t, scaled.to(tl.float32) * 2.0**-23
    remainder = tl.fma(t * square, p, tl.fma(e, LN2_LOW, -0.5 * square))
    return tl.fma(e, LN2_HIGH, t + remainder)


@jit
def cosine_sine(w1):
    """Return cos and sin of 2 pi w1 2^-32, from an angle in [-pi/4, pi/4] and the quadrant that it was taken out of."""
    k = (w1 + 0x20000000) >> 30
    a = (w1 - (k << 30)).to(tl.int32, bitcast=True).to(tl.float32) * RADIANS
    square = a * a
    p = tl.fma(square, 2.4433118596789427e-05, -0.0013887316454201937)
    p = tl.fma(square, p, 0.04166664555668831)
    c = tl.fma(square * square, p, tl.fma(square, -0.5, 1.0))
    p = tl.fma(square, -0.00019517265900503844, 0.008332177996635437)
    p = tl.fma(square, p, -0.16666655242443085)
    s = tl.fma(square * p, a, a)
    swapped = (k & 1) == 1
    cosine = tl.where(swapped, s, c).to(tl.uint32, bitcast=True) ^ (((k + 1) & 2) << 30)
    sine = tl.where(swapped, c, s).to(tl.uint32, bitcast=True) ^ ((k & 2) << 30)
    return cosine.to(tl.float32, bitcast=True), sine.to(tl.float32, bitcast=True)
