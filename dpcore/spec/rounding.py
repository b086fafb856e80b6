"""The rounding of sums of clipped vectors, by which noise is raised (`dpcore.plan.plan.Grid`)."""

from __future__ import annotations

from typing import Final

ROUNDING_SENT: Final = 1e-3
"""Up to this share of the clip norm processes send sums in float32."""

ROUNDING_STATED: Final = 1e-6
"""Beyond this share a statement tells of it."""

SUM_ROWS: Final = 512
"""A float64 product of pairs of several examples runs over at most so many rows."""

CANCELLATION: Final = 1 / 64
"""And over examples whose certified norm is at least this share of the sum of their terms' norms; others go alone."""

TIED: Final = 1 / 16
"""Least share of a tied matrix's certified norm in the sum of its two parts' norms."""

TIED_EXAMPLES: Final = 64
"""So many examples' two parts of a tied matrix are added one after the other at most."""


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

    Vectors that are pairs (`dpcore.spec.pair_ops`) add to it:

    - A product of several examples adds all their rows in any order, at most `SUM_ROWS`, each rounded 8 times at most
      before. Relative to the sizes of the terms that is 520 u, and these are at most C / `CANCELLATION` an example.
    - A tied matrix is added in two parts of at most C / `TIED` each, those of `TIED_EXAMPLES` examples after each
      other. So 2 B additions carry up to ``64 / TIED`` C more than whole examples do, and the linear parts of 64
      examples take one more addition to the total.

    In float32 (u = 2^-24) one example moved sums by 5.65 C at B = 1,000,000, d = 9.
    """
    u = 2.0**-53
    additions = terms * (terms + 3) * (1 + 1 / TIED_EXAMPLES)
    pairs = 2 * terms * ((SUM_ROWS + 8) / CANCELLATION + 2 * TIED_EXAMPLES / TIED)
    return (additions + pairs) * u / (1 - terms * u)


def message_rounding(terms: int) -> float:
    """Return how much further than C one example moves a sum that processes send each other in float32, as share of C.

    Notes
    -----
    Process r holds the float64 sum S_r of its share of the batch, sends it as float32, and what is received is added in
    float64. Each coordinate is rounded by at most u = 2^-24 of itself, so a message is off by at most ``u ||S_r||``,
    and all together by ``u sum_r ||S_r|| <= u B C``, with B = `terms` the most vectors that are ever summed. Another
    example may come before all others, so that all shares differ: two sums of neighboring data sets are off by twice
    that at most. The sums are divided by a power of two near C before they are rounded: nothing overflows, and what a
    coordinate below float32's normal numbers loses, 2^-126 C, does not count.
    """
    return 2 * terms * 2.0**-24
