"""The grid of a release: sum and noise are whole multiples of one step, so that a release has no digits of its own.

A step releases ``S + s n``: a sum S, and noise n of unit scale s. Floats for n would betray S: the values that ``S +
s n`` can take have holes, different for every S. Here the step of the grid is ``u = s 2^-bits``, and the release is

    u (A + M),   A = S / u,   M = floor(2^bits Z),

two integers below 2^51, whose sum is exact. A is a sum of integers, one vector of each example's
(`dpcore.spec.contributions`). Z is standard normal, and M is drawn with its law (`rounded_normal`). Since A is an
integer, ``A + floor(2^bits Z) = floor(2^bits (A 2^-bits + Z))``: a function of the Gaussian mechanism's output on S,
whatever it does afterwards with numbers that round. So the floats that a run releases have the guarantee of
real-valued Gaussian noise, for every accountant, sampler and composition, and independent noise pays nothing for its
grid.

**Squares** of their own are releases of ``h = (S / B)^2``, which is no integer: A is ``nearest(h / u)``. The product
rounds by at most 1/4 below 2^51, and nearest by 1/2, so that two of neighboring data sets move apart by at most 3/2
more in each of d coordinates, ``1.5 u sqrt(d)`` in norm. Relative to the noise that is ``1.5 2^-bits sqrt(d)``: 2e-8
for a million parameters at 36 bits.

**Correlated noise.** normalizer_t n_t = z_t + r_t with r_t made of earlier rows. Here ``M_t = K_t + R_t`` with ``K_t
= floor(2^bits Z_t)`` and ``R_t = nearest(2^bits r_t)``, and later rows are made of ``2^-bits M_t / normalizer_t`` in
float64. A neighbor releases the same numbers with rows K' for which ``K'_t - K_t = (A_t - A'_t) + (R_t - R'_t)``.
Were R exact, that would be C applied to the sums' difference, in units of the noise. nearest adds at most 1 a
coordinate to a row's difference, and float64 less than 1/2 (2^bits times 2^-53 times the size of r). What an error
at one row does to the others is a matrix L. A ring that keeps outputs continues from the rounded values, and so does a
recurrence (its input becomes ``m - r``), so that L is the identity. Rows made of earlier Z have L = C over its
diagonal: its columns have norms of at most 1, and its diagonal is at least 1 / growth, with the growth the largest row
norm of C^{-1}; ``||L|| <= sqrt(steps) growth``. In all ``1.5 2^-bits ||L|| sqrt(steps d)``, or 3 instead of 1.5 for
squares of their own.

`moved_share` is any of these, relative to an example's effect. Noise is raised by it, so that the events that a plan
states hold exactly.

References
----------
Mironov, "On significance of the least significant bits for differential privacy", CCS 2012.
Haney, Desfontaines, Hartman, Shrestha, Hay, "Precision-based attacks and interval refining", 2022: rounding to a grid
before and after continuous noise does not help if the noise itself is a float.
"""

import math
from typing import Any, Final

from dpcore.errors import ArgumentError
from dpcore.spec.rounded_normal import FRACTION_BITS, LARGEST

_INTEGER: Final = 1.5 * 2.0**52
LIMIT: Final = 2.0**51
"""Integers of a release are smaller than this."""
LARGEST_SUM: Final = 2.0**48
"""So are all examples' vectors of a sum together, in steps: their terms are below 2^53, some rounding included."""
LEAST_BITS: Final = 4
MOST_SHARE: Final = 0.25
"""Largest effect of the grid, relative to that of one example."""


def nearest(x: Any) -> Any:
    """Return the nearest integers of floats below 2^51, even ones of two: the same bits on every backend."""
    return (x + _INTEGER) - _INTEGER


def step_of(scale: float, bits: int, normalizer: float = 1.0) -> float:
    """Return the grid's step: of noise of standard deviation `scale`, over the normalizer of its correlation."""
    return scale * 2.0**-bits / normalizer


def released(integers: Any, m: Any, bits: int, factor: float) -> Any:
    """Return ``(integers + 2^bits m) factor``: a fresh float64 array of the backend that `integers` is of.

    Parameters
    ----------
    integers : (d,) float64 array
        The sum that must not leave without noise, in steps of the grid.
    m : (d,) float64 array
        Its noise, multiples of 2^-bits.
    factor : float
        The value of one step, such as ``step / batch_size``.
    """
    result = m * 2.0**bits
    result += integers
    result *= factor
    return result


def bits_for(largest_sum: float, growth: float = 1.0) -> int:
    """Return the digits of the finest grid on which sums are exact and the integers of a release are below `LIMIT`.

    Parameters
    ----------
    largest_sum : float
        Sum of all examples' clip norms, in standard deviations of their seed noise.
    growth : float
        The most that correlated noise can be, over the seed noise.

    Raises
    ------
    ArgumentError
        If fewer than 4 bits are left.
    """
    steps = min(LARGEST_SUM / largest_sum, LIMIT / (largest_sum + 2 * LARGEST * growth))
    bits = min(FRACTION_BITS, math.floor(math.log2(steps)))
    if bits < LEAST_BITS:
        raise ArgumentError(
            f"noise_multiplier: the largest sum may be {largest_sum:.3g} standard deviations of its noise, and float64 "
            f"has no grid for both; it must be below {LARGEST_SUM / 2**LEAST_BITS:.3g}: take more noise or a smaller "
            "batch"
        )
    return bits


def moved_share(
    bits: int, dimension: int, moved: float = 1.0, *, rows: int = 0, carried: float = 1.0, squares: bool = False
) -> float:
    """Return how far the grid moves the releases of neighbors apart, as a share x of how far they are apart.

    Noise that is 1 / (1 - x) times as large makes up for it: the grid's step grows with the noise.

    Parameters
    ----------
    bits, dimension : int
        Bits of the grid, and dimension of the vectors.
    moved : float
        How far a neighbor moves the sums, or C times the sums of a run, in standard deviations of the seed noise.
    rows : int
        The steps of a run with correlated noise; 0 for independent noise.
    carried : float
        A bound on ``||L||``.
    squares : bool
        Of squares of their own, which are rounded to the grid, and not of sums.

    Raises
    ------
    ArgumentError
        If the noise is so large that its grid is as coarse as the sum it hides.
    """
    each = (1.5 * squares + 1.5 * bool(rows)) * carried * math.sqrt(max(rows, 1))
    share = each * 2.0**-bits * math.sqrt(dimension) / moved
    if not share <= MOST_SHARE:
        raise ArgumentError(
            f"noise_multiplier: is so large that the grid of its noise, 2^-{bits} of a standard deviation in "
            f"{dimension:,} coordinates, moves sums by {share:.2g} of one example's effect: take less noise"
        )
    return share
