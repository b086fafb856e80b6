"""Contributions are integers: each example's clipped vector is rounded to the grid of the release, by itself.

Let u be the grid's step (`dpcore.spec.grid`), N_i the certified norm of example i's vector v_i, and ``w_i = f_i / u``
its weight, with the clip's factor f_i. Example i adds an integer vector k_i to the sum, a function of its own arrays
and of public numbers. Integers below 2^53 are added in float64 without any rounding, so that a sum is the same in any
order of additions, in micro-batches of any size, and over any number of processes, and that one example moves it by
k_i and nothing else. It remains to see how long k_i is:

- *Vectors that are formed* (rows, an example's own product, its sum over tokens): ``k_i = nearest(w_i v_i)``, off by
  1/2 a coordinate: ``||k_i|| <= w_i N_i + sqrt(d) / 2``.
- *Linear maps of few rows* are never formed. For the pair (e_t, a_t) of row t let alpha_t be an upper bound on |a_t|,
  and ``a'_t = nearest(2^F a_t / alpha_t)``, ``e'_t = nearest(w_i alpha_t 2^-F e_t)`` with F = `FACTOR_BITS`. Then
  ``k_i = sum_t e'_t a'_t^T``, and one float64 product over many examples adds all k_i exactly. With p and q the widths
  of a and e, ``|a'_t - 2^F a_t / alpha_t| <= sqrt(p) / 2`` and likewise for e'_t, so that k_i differs from w_i v_i by
  at most ``w_i 2^-F sqrt(p) / 2 sum_t alpha_t |e_t|``, which is in N_i, and ``T sqrt(q) / 2 (2^F + sqrt(p) / 2)``.

- *Linear maps of one row*, with a public L that no ``w_i N_i`` exceeds, may have coarser factors, of two bytes each:
  8-bit tensor cores multiply these by four products, and add 32-bit integers. With R = `LARGEST_FACTOR` and m =
  `multiple_of` (L), ``a' = nearest(R a / alpha)``, ``e'`` is e times a number, rounded, and ``k_i = m e' a'^T``. So
  ``||k_i|| = m |e'| |a'|`` with integers e' and a': known before anything is added. Before it is rounded, e' has the
  length ``T = w_i |a| |e| / (m |a'|)``. Nearest integers of a short vector would all be 0, and a layer whose gradients
  are small would learn nothing. So a number goes up to the next integer if its fraction is above a hash of the number
  and its column, between 0 and 1, and down if not: on average over examples and steps nothing is lost. The hash is a
  function of the example, like everything here. No number moves by more than 1, so that ``|e'| <= T + sqrt(q)`` and
  ``||k_i|| <= w_i N_i + m |a'| sqrt(q)``. ``|a'|`` is between ``R (1 - 2^-7)`` and ``R (1 + 2^-7)`` up to
  `WIDEST_SLICED` columns, so that T stays below R. k_i is off from w_i v_i by ``(sqrt(p) + 2 sqrt(q)) m R`` at most,
  and by chance only but for a'.

The part that does not grow with w_i is `rounding_of_rows`, `rounding_of_linear` and `rounding_of_slices`: the clip
leaves as much room for it (`dpcore.spec.ops.Backend.clip_factors`), so that ``||k_i|| <= C / u``.

**No sum leaves the integers of float64.** N_i is at least `CANCELLATION` times the sum of its terms' norms if terms
enter a sum one by one (few rows; the two parts of a tied matrix). So B examples' terms are below ``B C / (u
CANCELLATION)`` and a little more for their rounding, and `dpcore.spec.grid.bits_for` keeps that below 2^53.
"""

import math
from typing import Final

FACTOR_BITS: Final = 16
"""F: binary digits of an activation, relative to its row's norm, if an example's product is not formed."""

FEW_ROWS: Final = 24
"""Linear maps of fewer rows may be added without their product."""

CANCELLATION: Final = 1 / 16
"""Least share of the certified norm in the sum of its terms' norms, if these enter a sum one by one."""

LARGEST_FACTOR: Final = 127 * 256
"""R: the largest integer of a factor of two bytes. The lower byte has a sign, and is 128 in size at most."""

WIDEST_SLICED: Final = 1 << 17
"""Most columns, of a and of e, for factors of two bytes: the squares of either's integers add up to less than 2^31."""

MOST_ROUNDED: Final = 0.25
"""Largest share of a clip norm for rounding; noise that needs more, on that many coordinates, is refused."""


def multiple_of(longest: float) -> int:
    """Return m: what factors of two bytes are multiplied by, for addends of at most `longest` in norm."""
    return max(1, math.ceil(longest * (1 + 2.0**-6) / LARGEST_FACTOR**2))


def rounding_of_slices(q: int, longest: float) -> float:
    """Return how far, in the grid's steps, factors of two bytes lengthen an addend of at most `longest` in norm."""
    return multiple_of(longest) * LARGEST_FACTOR * (1 + 2.0**-7) * math.sqrt(q) * (1 + 2.0**-20)


def rounding_of_rows(size: int) -> float:
    """Return how far, in the grid's steps, rounding moves a vector of `size` coordinates that is formed."""
    return math.sqrt(size) / 2 * (1 + 2.0**-20)


def rounding_of_linear(q: int, p: int, rows: int = FEW_ROWS - 1) -> float:
    """Return how far, in the grid's steps, rounding moves a (q, p) weight's gradient of `rows` rows, formed or not.

    The number of an example's rows is public: all examples of a data set have one shape. Float64 rounds each product
    before `nearest` by 2^-53 of itself: included in the last factor.
    """
    factors = rows * math.sqrt(q) / 2 * (2.0**FACTOR_BITS + math.sqrt(p) / 2) if rows < FEW_ROWS else 0.0
    return max(factors, rounding_of_rows(p * q)) * (1 + 2.0**-20)
