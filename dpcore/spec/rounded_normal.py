"""The law of the noise: floor(2^36 Z) for a standard normal Z, an integer that is drawn exactly.

Why not a float normal: a run releases ``S + sigma z``. A float z has holes, different for every S, so that the last
digits of a release rule out values of S (Mironov 2012). Noise on a grid that does not depend on
the data has none (`dpcore.spec.ops.Backend.step`).

The sampler
-----------
Sign and size are drawn apart: K is k for one sign and ``-1 - k`` for the other, with k = floor(2^36 |Z|). The density
of |Z|, ``f(x) = sqrt(2 / pi) exp(-x^2 / 2)``, is cut into strips of width 2^-6 up to 10. In strip j the place of k is m
= 0 .. 2^30 - 1. Below f lie a box (every m alike) and a staircase of 512 steps from the left to the right, both of a
mass that is a multiple of 2^-24. One word of 32 bits, and 2 bits of another one, choose sign, box or staircase, and a
step; the other 30 bits are m. A staircase is a box whose places are mirrored at random: with t uniform in 0 .. 511 and
c = m >> 21, m stays where ``t < 511 - c`` and else becomes ``2^30 - 1 - m``, so that step c has the probability
``(2 (511 - c) + 1) / 512^2``. All this is exact: the boxes and staircases are chosen by an alias table of 1024 columns
(Walker 1977) with thresholds of 14 bits, whose last region is all the rest: 4.5e-5 of the mass.

The rest, ``r_j(m) = f - box - staircase >= 0``, is drawn by rejection. A word of 63 bits chooses a strip by hats h_j >=
r_j, integers that add up to nearly 2^63 (beyond their sum: again), and v with 53 bits accepts m where ``v h_j <
r_j(m)``, at 43 of 100 trials.

Below f: f is concave up to 1, where the chord from the left end to the right lies below it, and convex beyond, where
the tangent at the middle does. The staircase is half of the slope's mass, one step lower than the line, rounded down.

Distance from the law
---------------------
Boxes, staircases, hats and their choice are rational numbers, met exactly. r_j(m) is computed in float64, at the middle
of the cell. Relative to f it errs by: 2^-52 for f at the left end (rounded once) and its scale; for ``exp(-e)``, e =
delta (x + delta / 2) <= 0.16, 2 roundings of e, the last of 12 terms of its series below 2^-60, and Horner's rule, 3
roundings at most as the terms shrink; 2 products; the staircase, below f, 2 roundings; the difference 1. Together less
than 12 2^-53 of f. The density's mean over a cell of width 2^-36 is that at its middle within 2^-76 max(1, x^2). v, its
product and the rounded hat add ``3 2^-53 h_j``, with h_j at most 1.17 f. So a place's acceptance probability is right
within 15.6 2^-53 of f.

Acceptance is divided by its sum. Errors relative to f add up there, against a rest of 4.5e-5 of the mass: in the
worst case 2^-35 of it. Added up over all 2^30 places of each of the first 384 strips (`docs/studies/rest_sum.py 384`),
the sum is too small by 3.610e-14 of it, mostly for the rounding of f at the left ends, and every r lies between 0.001
and 1 of its hat; the other strips can change the sum by 1e-19. So it is off by less than 2^-44.6, which moves k by that
share of r / f: 5e-5 in the middle and 1 beyond 5.4, and in the root of the mean square over k 1.1e-3, so 2^-54.4.
Every k is then right within a factor ``1 + 2^-49 + 2^-44 r / f``, and in the root of the mean square within 2^-49.
Beyond 10 there is nothing, where the law has 1.6e-23. N draws together are within

    N 2^-75 + sqrt(N) 2^-49

of independent rounded normals in total variation: the first term for what lies beyond 10; the second by the
Kullback-Leibler divergence, at most the chi-squared one, at most e^2 a draw for relative errors of the root mean square
e = 2^-49, and Pinsker's inequality, ``sqrt(N e^2 / 2)``. For 1e12 draws that is 1.8e-9. A release that is (epsilon,
delta)-private with the exact law is (epsilon, delta + (1 + exp(epsilon)) distance)-private with this one.

References
----------
Mironov, "On significance of the least significant bits for differential privacy", CCS 2012.
Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy", 2020 (another law on a grid).
Marsaglia, Tsang, "The ziggurat method", 2000 (boxes, wedges and a tail by horizontal layers).
"""

import math
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

FRACTION_BITS: Final = 36
"""Of the finest grid: normals are multiples of 2^-36."""
FINE_BITS: Final = 30
"""Of a place within a strip."""
STRIPS: Final = 640
COLUMN_BITS: Final = 10
THRESHOLD_BITS: Final = 14
STAIR_BITS: Final = 9
REST: Final = 2**COLUMN_BITS - 1
"""The region of the rest; region 2 j is the box of strip j, and 2 j + 1 its staircase."""
TRIALS: Final = 3
"""Of the rest, in one block of the cipher: five words each."""
LARGEST: Final = 10
"""No normal is as large as this."""

_WIDTH = Decimal(2) ** -6
_UNITS = 2 ** (COLUMN_BITS + THRESHOLD_BITS)
_STAIRS = 2**STAIR_BITS
_HATS = 2**63
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097")
SERIES: Final = tuple((-1) ** k / math.factorial(k) for k in range(12))
"""Of exp(-e)."""


class Strip(NamedTuple):
    """One strip's masses: f at its left end times its width, box and staircase in units of 2^-24, and a hat."""

    left: Decimal
    box: int
    staircase: int
    hat: Decimal


class Tables(NamedTuple):
    """The tables of backends: see the module.

    Attributes
    ----------
    columns : (1024,) uint32
        A column's threshold, shifted by 10 bits, and the region beyond it; below it the region is the column's own.
    ends : (640,) uint64
        Sums of the hats up to each strip, itself included.
    numbers : (4, 640) float64
        For each strip, in units of the hats: f at its left end, the hat, the box, and one step of the staircase.
    """

    columns: NDArray[np.uint32]
    ends: NDArray[np.uint64]
    numbers: NDArray[np.float64]


def strips() -> list[Strip]:
    """Return the masses of all strips; see the module for the proof that they are below f."""
    with localcontext() as context:
        context.prec = 50
        root, result = (2 / _PI).sqrt() * _WIDTH, []
        f = [root * (-((_WIDTH * half / 2) ** 2) / 2).exp() for half in range(2 * STRIPS + 1)]
        for j in range(STRIPS):
            left, middle, right = f[2 * j : 2 * j + 3]
            start, stop = _WIDTH * j, _WIDTH * (j + 1)
            if stop <= 1:  # the chord; f'' = (x^2 - 1) f bounds the mass above it
                lowest, slope = right, left - right
                above = _WIDTH**2 / 8 * (1 - start * start) * left
            else:  # the tangent at the middle; a convex function is farthest from it at an end
                slope = (start + stop) / 2 * _WIDTH * middle
                lowest = middle - slope / 2
                above = max(left - lowest - slope, right - lowest)
            box = int((lowest - slope / (2 * _STAIRS)) * _UNITS) if 2 * j + 1 < REST else 0
            staircase = int(slope / 2 * _UNITS) if 2 * j + 1 < REST else 0
            hat = min(left - Decimal(box) / _UNITS, above + slope / _STAIRS + Decimal(3) / _UNITS)
            result.append(Strip(left, box, staircase, hat))
    return result


@lru_cache(maxsize=1)
def tables() -> Tables:
    """Return the tables, the same numbers on every machine."""
    cut = strips()
    masses = [mass for strip in cut[: REST // 2] for mass in (strip.box, strip.staircase)]
    masses += [0] * (REST - len(masses))
    thresholds, others = _aliases([*masses, _UNITS - sum(masses)])
    columns = [limit << COLUMN_BITS | other for limit, other in zip(thresholds, others, strict=True)]
    with localcontext() as context:
        context.prec = 50
        scale = (_HATS - STRIPS) / sum((strip.hat for strip in cut), Decimal(0))
        hats = [int(strip.hat * scale) + 1 for strip in cut]
        numbers: list[list[Any]] = [
            [strip.left * scale for strip in cut],
            hats,
            [strip.box * scale / _UNITS for strip in cut],
            [strip.staircase * scale * 2 / (_UNITS * _STAIRS) for strip in cut],
        ]
        rows = [[float(value) for value in row] for row in numbers]
    ends = np.cumsum(np.array(hats, dtype=np.uint64), dtype=np.uint64)
    made = Tables(np.array(columns, dtype=np.uint32), ends, np.array(rows))
    for array in made:
        array.flags.writeable = False
    return made


def _aliases(masses: list[int]) -> tuple[list[int], list[int]]:
    """Return a threshold and another region for each column, so that the regions have these masses (Walker 1977)."""
    size = 2**THRESHOLD_BITS
    thresholds, others = list(masses), list(range(len(masses)))
    small = [region for region, mass in enumerate(masses) if mass < size]
    large = [region for region, mass in enumerate(masses) if mass > size]
    while small:
        column, region = small.pop(), large[-1]
        others[column] = region
        thresholds[region] -= size - thresholds[column]
        if thresholds[region] <= size:
            large.pop()
            if thresholds[region] < size:
                small.append(region)
    return thresholds, others


def rest(strip: Any, place: Any, bits: int = FINE_BITS) -> Any:
    """Return r_j(m), in units of the hats: float64, for arrays of strips j and places m of `bits` bits.

    It uses only additions and products, each rounded once and in this order, so that all backends accept the same.
    """
    numbers = tables().numbers[:, strip]
    left, _, box, step = numbers.tolist() if isinstance(strip, int) else numbers
    stair = place >> (bits - STAIR_BITS)
    delta = (place + 0.5) * 2.0 ** -(bits + 6)
    e = delta * (strip * 2.0**-6 + 0.5 * delta)
    series = SERIES[-1] + 0.0 * e
    for coefficient in SERIES[-2::-1]:
        series = series * e + coefficient
    return left * series - (box + step * (511.5 - stair))


def distance(draws: float) -> float:
    """Return a bound on the total variation distance of `draws` draws together from independent rounded normals."""
    return draws * 2.0**-75 + math.sqrt(draws) * 2.0**-49
