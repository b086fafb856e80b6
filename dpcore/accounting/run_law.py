"""The law of the number of runs of a private selection; `dpcore.accounting.selection` has its formulas."""

import math

from dpcore.errors import ArgumentError

_LEAST_LOG, _GREATEST_LOG = -690.0, -1e-9  # of g


def continuation(shape: float, expected_runs: float) -> float:
    """Return g, at which the truncated negative binomial law of this shape has this mean.

    Parameters
    ----------
    shape : float
        h > -1.
    expected_runs : float
        More than 1.

    Returns
    -------
    float
        0 < g < 1.

    Raises
    ------
    ArgumentError
        If no float64 g has that mean: it is too close to 1, or too large for a shape close to -1.
    """
    from scipy.optimize import brentq

    wanted = math.log(expected_runs)
    least, most = (mean_of(shape, math.exp(end)) for end in (_GREATEST_LOG, _LEAST_LOG))
    if not least < expected_runs < most:
        raise ArgumentError(
            f"expected_runs={expected_runs!r}: must be more than 1 (by 1e-6 at least) and less than {most:.3g}, the "
            f"most that shape={shape!r} allows"
        )
    root = brentq(lambda x: math.log(mean_of(shape, math.exp(x))) - wanted, _LEAST_LOG, _GREATEST_LOG, xtol=1e-14)
    return math.exp(root)


def mean_of(shape: float, g: float) -> float:
    """Return E K of that law: h (1-g) / (g (1 - g^h)), and (1/g - 1) / log(1/g) at h = 0."""
    share = -math.log(g) if shape == 0.0 else -math.expm1(shape * math.log(g)) / shape
    return (1.0 - g) / g / share


def any_of(shape: float | None, expected_runs: float, d: float) -> float:
    """Return 1 - F(1-d), the probability that one of K runs meets an event of probability d."""
    if shape is None:
        return -math.expm1(-expected_runs * d)
    g = continuation(shape, expected_runs)
    grown = math.log1p((1.0 - g) * d / g)
    return grown / -math.log(g) if shape == 0.0 else math.expm1(-shape * grown) / math.expm1(shape * math.log(g))


def each_of(shape: float | None, expected_runs: float, delta: float) -> float:
    """Return the d at which `any_of` is delta, its inverse; 1 if none is as likely as that."""
    if shape is None:
        return min(1.0, -math.log1p(-delta) / expected_runs)
    g = continuation(shape, expected_runs)
    grown = -delta * math.log(g) if shape == 0.0 else -math.log1p(delta * math.expm1(shape * math.log(g))) / shape
    return min(1.0, math.expm1(grown) * g / (1.0 - g))


def runs_at(shape: float | None, expected_runs: float, share: float) -> int:
    """Return the least k with Pr[K <= k] >= share: K itself, for a uniform share in (0, 1).

    Pr[K = 1] = F'(0) = m g^(h+1) and Pr[K = k+1] = Pr[K = k] (1-g) (k+h) / (k+1); under the law of Poisson
    Pr[K = 0] = e^(-m) and Pr[K = k+1] = Pr[K = k] m / (k+1). The law is that to the rounding of its sums, about 1e-15.
    """
    if shape is None:
        count, mass, growth, plus = 0, math.exp(-expected_runs), expected_runs, None
    else:
        g = continuation(shape, expected_runs)
        count, mass, growth, plus = 1, mean_of(shape, g) * g ** (shape + 1.0), 1.0 - g, shape
    total = mass
    while total < share and mass > 0.0:
        mass *= growth * (1.0 if plus is None else count + plus) / (count + 1)
        count, total = count + 1, total + mass
    return count
