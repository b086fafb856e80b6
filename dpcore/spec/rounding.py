"""The rounding of `weighted_sum`, and what it adds to the sensitivity of a computed sum."""

from __future__ import annotations

from typing import Final

ROUNDING_COUNTED: Final = 1e-3
"""Beyond this share of the clip norm the rounding of sums is part of the sensitivity."""

SUM_ROWS: Final = 512
"""A float64 product of pairs runs over at most so many rows of whole examples, or over one example."""

CANCELLATION: Final = 2.0**-14
"""Least share of a certified norm in the sum of the norms of the terms that it is the sum of (operations on pairs)."""

TIED: Final = 0.25
"""Least share of a tied matrix's certified norm in the sum of its two parts' norms."""


def rounding(terms: int) -> float:
    """Return how much further than C one example moves a computed float64 sum, as a share of C.

    Notes
    -----
    Let B = `terms` be the most vectors that are ever summed, u = 2^-53, and v_i the clipped vectors, ``||v_i|| <= C``.
    An addition rounds each coordinate by at most u of its result, so it moves the vector by at most u of its norm; with
    k terms below it that is u k C. Whatever the order, the numbers k of all B additions (the first to 0) add up to at
    most B (B + 1) / 2. Products of float32 numbers are exact in float64, those of float64 numbers round by u each: B u
    C more. Rounding of rounded numbers adds a factor 1 / (1 - B u). So a computed sum is within ``B (B + 3) / 2 u C /
    (1 - B u)`` of the true one, and two sums of neighboring data sets differ by at most C and twice that. The dimension
    does not enter.

    In float32 (u = 2^-24) one example moved sums by 5.65 C at B = 1,000,000, d = 9.
    """
    u = 2.0**-53
    return terms * (terms + 3) * u / (1 - terms * u)
