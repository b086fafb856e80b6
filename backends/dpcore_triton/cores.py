"""Products on tensor cores: how they round, and what a norm adds for it.

A tensor core multiplies numbers of 16 bits exactly. It adds K products and the accumulator aligned to the largest of
them, keeps p more bits than float32, and truncates: (K, p) is (8, 1) on an A100 and (16, 2) on an H100 (Fasi, Higham,
Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021; Khattak, Mikaitis, arXiv 2512.07004). K products
err by at most ``((K + 1) 2^-p + 1) 2^-23`` times the sum of the sizes of accumulator and products, so that 16 of them
err by less than ``0.7 2^-19``; `BLOCK` leaves room for what the accumulator has grown by. This is knowledge of chips,
not their documentation: `asv_benchmarks/gpu` tests it on the chip at hand, and these kernels run on the chips of
`dpcore_triton.chips` only.

Let s be a sum of products in exact arithmetic, and s' the sum of their sizes. `depth` products at a time are added on
the tensor core, from 0, and what comes out, times the part's point weight, to a float32 number. So the sum is off by at
most ``rho s'`` in any order of additions, with

    rho = products depth / 16 BLOCK + split + (chunks + 4) 2^-24

where `chunks` are added up. (4: the weight, its product, what underflows, and terms of second order.) Or all of them
are added in one chain, of 16 products after 16 products, where each part's last 16 may be fewer: then `depth` is 16
times their number, and there is one chunk, whose weight is the example's, too.

**Float32 numbers** are split: ``x = x1 + x2 + d`` with x1 and x2 the nearest bfloat16 numbers of x and of ``x - x1``,
of 8 bits each, so that ``|x2| < 2^-8 |x|`` and ``|d| < 2^-17 |x|``. Three products are added: ``x1 y1``, ``x1 y2`` and
``x2 y1``. What is left out is ``x2 y2 + (x1 + x2) d_y + d_x y``, below ``2^-15 |x y|``: `SPLIT`.

**Sizes.** Let |a_t| and |e_t| be the norms of a term's rows with each coordinate raised by 2^-50, and S the sum of
``|w_t| |a_t| |e_t|`` with the point weights, at least. Products of raised coordinates are at least 2^-100, so that all
of the above holds where numbers underflow, too: before or after a product that loses 2^-126 at most. A row from 2^50 on
makes S infinite, and an S from 2^60 on the norm, so that no finite norm has an overflow behind it.

**Norms.** Let v be an example's vector, v~ what the sum adds, before it is rounded to integers, and v' what the norm's
kernel makes of the same numbers, in another order. A coordinate of each is off from v's by rho times the sum of its
terms' sizes, so that by Cauchy's inequality the vectors are off by rho S.

- *Tiles.* ``|v~| <= |v'| + (rho~ + rho') S``, for the sum and the norm may add in different chunks, and the squares of
  v' are added in float32 along a tile's row, `WIDE` of them at most.
- *Inner products.* ``P_st = a_s . a_t`` is off by ``rho_p |a_s| |a_t|``, that of gradients by rho_q likewise, and their
  product by ``rho_p + rho_q + rho_p rho_q`` and 5 roundings; these are added over blocks, and along a row, in float32.
  So ``|v|^2 <= Q + eps S^2``, and ``|v~| <= |v| + rho S``.

Weights of examples are rounded to float32: `raising` has that.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl

from dpcore_triton.launch import INTERPRETED, jit
from dpcore_triton.pairs import Bound

# The share of the sizes that 16 products on a tensor core are off by, and what splitting float32 numbers leaves out.
BLOCK, SPLIT, UNIT = 2.0**-19, 2.0**-15, 2.0**-24
# Positions of a block of inner products, rows and columns of a tile of float32 numbers; most columns of a tile.
SIDE, WIDE = 64, 128
# Products that are added on the tensor core from 0: of 16-bit numbers, and of float32 numbers that are split.
CORE_DEPTH, SPLIT_DEPTH = tl.constexpr(64), tl.constexpr(16)
# Positions up to which 16-bit numbers are added in one chain: a norm grows by ``2^-15 S`` for it at most.
CHAIN = 256
# What is lost where a product of two inner products, or with a weight, underflows: 2^-126 for each of fewer than 2^40
# pairs of positions, or coordinates and chunks. And the S from which on a norm is infinite.
UNDER, LIMIT = 2.0**-40, 2.0**60
# Least size of a coordinate, and the size from which on a row is not finite; the square of the latter, for squares.
RAISED, ROW = tl.constexpr(2.0**-50), tl.constexpr(2.0**100)
# A row's squares are added in float32, this many at a time: off by 2^-11 of themselves at most up to `WIDEST` columns.
MARGIN, WIDEST = tl.constexpr(1 + 2.0**-10), 1 << 20
LARGEST = (1 << 31) - 1  # numbers of a matrix: places in it are of 32 bits


def rounding(counts: Sequence[int], *, split: bool, chained: bool = False) -> float:
    """Return rho of sums of so many products, which are added up one sum after the other, or in one chain."""
    if chained:
        return sum(-(-count // 16) for count in counts) * BLOCK + 5 * UNIT
    depth = int((SPLIT_DEPTH if split else CORE_DEPTH).value)
    chunks = sum(-(-count // depth) for count in counts)
    return (3 * depth / 16 * BLOCK + SPLIT if split else depth / 16 * BLOCK) + (chunks + 4) * UNIT


def most_rounding(counts: Sequence[int]) -> float:
    """Return the largest rho of sums of so many products, whatever the dtype."""
    chained = rounding(counts, split=False, chained=True) if sum(counts) <= CHAIN else 0.0
    return max(chained, *(rounding(counts, split=split) for split in (False, True)))


def tiles_bound(rho: float) -> Bound:
    """Return the bound for norms by tiles, of a vector whose sum and whose norm are off by `rho` together."""
    return Bound(0.0, rho, 1 + (WIDE + 8) * UNIT, UNDER, LIMIT)


def gram_bound(rho: float, p: int, q: int, blocks: int, *, split: bool) -> Bound:
    """Return the bound for norms by inner products, in a row of so many blocks at most."""
    x, y = (rounding([width], split=split) for width in (p, q))
    return Bound(x + y + x * y + (blocks + SIDE + 8) * UNIT, rho, 1 + 8 * UNIT, UNDER, LIMIT)


_INTERPRETED = tl.constexpr(INTERPRETED)

# Integers that float32 additions of 1.5 2^23 make, of 22 bits each, and where examples' sums of them go to float64.
MAGIC, MAGIC_BITS, WORD = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000), tl.constexpr(2.0**22)
SHIFTED, LARGEST_WEIGHT = tl.constexpr(1.5 * 2.0**45 + 1.5 * 2.0**23), tl.constexpr(2.0**103)
BATCH = tl.constexpr(256)
# The norm of an example's addend up to which words hold it, with room for what rounds it.
FARTHEST = 2.0**42


@jit
def rounded(x):
    """Return the nearest numbers that bfloat16 has, away from 0 of two, in float32: two operations on integers."""
    return ((x.to(tl.uint32, bitcast=True) + 0x8000) & 0xFFFF0000).to(tl.float32, bitcast=True)


@jit
def narrow(x):
    """Return the nearest bfloat16 numbers; in the interpreter, which cannot compute with them, in float32."""
    if _INTERPRETED:
        return rounded(x)
    return x.to(tl.bfloat16)


@jit
def read(at, mask):
    """Load numbers as they are; in the interpreter, which cannot compute with bfloat16, as float32 numbers."""
    x = tl.load(at, mask=mask, other=0.0)
    if _INTERPRETED:
        x = x.to(tl.float32)
    return x


@jit
def product(x, y, total):
    """Return `total` plus a product of 16-bit numbers on the tensor core."""
    return tl.dot(x, y, total, input_precision="ieee")


@jit
def multiplied(x, y, total, KIND: tl.constexpr):
    """Return `total` plus x y: one product of 16-bit numbers, three of float32 numbers."""
    if tl.float32 == KIND:
        x1, y1 = rounded(x), rounded(y)
        x2, y2 = narrow(x - x1), narrow(y - y1)
        x1, y1 = narrow(x1), narrow(y1)
        total = product(x1, y2, total)
        total = product(x2, y1, total)
        return product(x1, y1, total)
    return product(x, y, total)


@jit
def square_sum(v):
    """Return the sum of squares of a tile, in float64; its numbers are taken relative to the largest."""
    largest = tl.max(tl.max(tl.abs(v), axis=1), axis=0)
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
    x = v * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    unit = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float64)
    return tl.sum(tl.sum(x * x, axis=1).to(tl.float64), axis=0) * (unit * unit)


@jit
def fused(x, y, z):
    """Return ``x y + z``, rounded once; in the interpreter, which has no such operation, by way of float64."""
    if _INTERPRETED:
        return (x.to(tl.float64) * y + z).to(tl.float32)
    return tl.fma(x, y, z)


@jit
def words_of(v, weight):
    """Return integers whose first times 2^22 plus the second is the nearest one to ``weight v``, up to `FARTHEST`.

    A float32 number between 2^23 and 2^24 is an integer, whose bits count it. With h the first integer, ``|h| <= 2^21``
    and ``SHIFTED - 2^22 (MAGIC + h) = MAGIC - 2^22 h`` is a float32 number. What the product is more than ``2^22 h`` is
    2^21 at most: the third operation rounds it, and nothing before does.
    """
    high = fused(v, weight * (1 / WORD), MAGIC)
    low = fused(v, weight, fused(high, -WORD, SHIFTED))
    return high.to(tl.int32, bitcast=True) - MAGIC_BITS, low.to(tl.int32, bitcast=True) - MAGIC_BITS
