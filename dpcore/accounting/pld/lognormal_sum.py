"""The law of the sum of t independent X on a grid, tilted: what `dpcore.accounting.pld.allocation` needs of it.

The law of one X = e^(z/s - 1/(2 s^2)), z standard normal, is once larger in the convex order, once smaller. Of an
interval of X, Q is its mass under z, and P = E[X; interval] its mass under z + 1/s, since E X = 1.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpcore.accounting.pld.compose import power, transform_error
from dpcore.accounting.pld.discretize import MOST_TAKEN, kept_parts
from dpcore.accounting.pld.loss import normal_masses
from dpcore.spec import special

Array = npt.NDArray[np.float64]

_UNIT = 2.0**-53
_UNDERFLOW = 1e-290  # above the L2 norm of all that a transform loses below the smallest float64
_LOG_LEAST = -30.0  # of the tilted mass above the window
_TRIES = 24
_RARE = 0.02  # how often the largest of all X lies above the first range
_RATIO, _MOST_RANGES = 16.0, 8  # of the ends of ranges, or more where there would be more than so many


@dataclass(frozen=True)
class TiltedSum:
    """Masses of S at `values` (n,), multiplied by e^(rate S - log_total).

    `error` bounds the L2 norm of what rounding adds, `left` the tilted mass above the window, which the transform folds
    into it, and `beyond` the same without the tilt (where the rate is above 0: weighed by S over the window's end).
    """

    sums: Array
    values: Array
    rate: float
    log_total: float
    error: float
    left: float
    beyond: float

    @property
    def g(self) -> float:
        """Step of the grid."""
        return float(self.values[1] - self.values[0])

    def plain(self, sums: Array) -> Array:
        """Return masses without the tilt."""
        with np.errstate(under="ignore", over="ignore"):
            result: Array = sums * np.exp(np.minimum(self.log_total - self.rate * self.values, 700.0))
        return result


def ranges(t: int, s: float, cap: float) -> list[tuple[float, float]]:
    """Return intervals up to the cap; the largest X lies in one of them, and in the first but once in many times.

    A grid that reaches to the rare, large X would be too coarse for the many others.
    """
    z, last = -float(special.ndtri(min(0.5, _RARE / t))), math.log(cap)
    first = max(z / s - 0.5 / s**2, last - _MOST_RANGES * math.log(_RATIO))
    if first >= last:
        return [(0.0, cap)]
    count = max(1, math.floor((last - first) / math.log(_RATIO)))
    ends = [0.0, *np.exp(np.linspace(first, last, count + 1)[:-1]).tolist(), cap]
    return list(itertools.pairwise(ends))


def transformed(
    t: int, s: float, low: float, high: float, rate: float, size: int, *, lower: bool, add: bool, last: bool
) -> TiltedSum:
    """Return the law of the sum where the largest X lies in [low, high], with X `split`, or for a lower bound `merged`.

    That is the law of all X up to `high` without that of all X up to `low`. The curve of "remove" falls with X, that of
    `add` grows: X above the `last` range is left out, or for an upper bound of "add" moved down to its end. The tilt is
    at most `rate`.
    """
    g, wanted = step(t, s, low, high, size, lower, add, last), rate
    values, few, more = _log_masses(s, g, low, high, lower, add, last)
    plain, end = np.logaddexp(few, more), t * float(values[0]) + size * g
    for attempt in range(_TRIES):
        rate = wanted * 0.85**attempt  # a weaker tilt leaves less above the window
        logs = plain + rate * values
        total = _log_sum(logs)
        logs -= total
        log_left = _log_left(logs, values, t, end, max(0.0, -rate))
        if log_left < _LOG_LEAST:
            break
    left = math.exp(min(0.0, log_left))
    if low > 0.0:
        sums, error = _difference(np.exp(few + rate * values - total), np.exp(more + rate * values - total), t, size)
    else:
        sums, error = _power(np.exp(logs), t, size)
    log_beyond = log_left + t * total - rate * end
    at: Array = t * float(values[0]) + g * np.arange(size, dtype=np.float64)
    return TiltedSum(sums, at, rate, t * total, error, left, math.exp(min(700.0, log_beyond)))


@lru_cache(maxsize=64)
def step(t: int, s: float, low: float, high: float, size: int, lower: bool, add: bool, last: bool) -> float:
    """Return the step of a grid with a window that holds the sum but once in very many times."""
    second = math.exp(min(600.0, s**-2)) * float(special.ndtr(s * math.log(high) - 1.5 / s))
    window = 1.5 * high + t + 10.0 * math.sqrt(t * second)
    for _ in range(_TRIES):
        g = window / size
        values, few, more = _log_masses(s, g, low, high, lower, add, last)
        if _log_left(np.logaddexp(few, more), values, t, t * float(values[0]) + window, 0.0) < _LOG_LEAST:
            break
        window += 0.15 * (window - t)
    return g


@lru_cache(maxsize=12)
def _log_masses(
    s: float, g: float, low: float, high: float, lower: bool, add: bool, last: bool
) -> tuple[Array, Array, Array]:
    """Return points, and the log masses at them of X up to `low` and of X in [low, high]."""
    points = math.ceil(high / g) + 1  # one more: the quotient may be rounded down
    if lower:
        at, edges = bins(s, g, points)
        parts = [merged(s, at, edges, *part, rising=add) for part in ((0.0, low), (low, high))]
    else:
        at = g * np.arange(points + 1, dtype=np.float64)
        parts = [split(s, g, points, *part) for part in ((0.0, low), (low, high))]
        if add and last:
            parts[1][int(high / g)] += masses(s, np.array([high, np.inf]))[1][0]
    with np.errstate(divide="ignore"):
        few, more = np.log(parts[0]), np.log(parts[1])
    return at, few, more


def _log_left(logs: Array, values: Array, count: int, window: float, least: float) -> float:
    """Return the log of a bound on the mass of the sum above the window, by exponents of `least` and more."""
    exponents = [least + exponent / window for exponent in (8.0, 20.0, 35.0, 55.0, 90.0)]
    return min(count * _log_sum(logs + v * values) - v * window for v in exponents)


def _power(mass: Array, count: int, size: int) -> tuple[Array, float]:
    """Return the `count`-fold convolution modulo `size` of masses that add up to 1, and a bound on its L2 error."""
    from scipy.fft import irfft, rfft

    growth = transform_error(size)
    summed: Array = irfft(power(rfft(mass, n=size), count), n=size)
    norm, each = _norm(summed), growth + 2.0 * _UNIT
    error = count * (growth * _norm(mass) + 2.0 * _UNIT)
    if count * each < 1e-3:
        error = min(error, count * each * (8.0 / 7.0 * norm + 0.9 ** (count - 1.0)))
    return summed, 1.04 * (error + (growth + 4.0 * _UNIT * count) * norm) + _UNDERFLOW


def _difference(few: Array, more: Array, count: int, size: int) -> tuple[Array, float]:
    """Return the convolution of few + more without that of few, and a bound on its L2 error.

    With B and T their transforms and A = B + T: A^t - B^t = T (A^(t-1) + A^(t-2) B + ... + B^(t-1)), no digit of which
    is lost, however small T is. The sum has t products of t - 1 factors of size 1 at most, each off by `each`.
    """
    from scipy.fft import irfft, rfft

    growth = transform_error(size)
    b, rare = rfft(few, n=size), rfft(more, n=size)
    a = b + rare
    # Of n factors: the sum of products, A^n and B^n; doubled, and one more where the count has the bit.
    total, power_a, power_b = np.zeros_like(a), np.ones_like(a), np.ones_like(a)
    for digit in bin(count)[2:]:
        total, power_a, power_b = total * (power_a + power_b), power_a * power_a, power_b * power_b
        if digit == "1":
            total, power_a, power_b = total * a + power_b, power_a * a, power_b * b
    summed: Array = irfft(rare * total, n=size)
    each, mass = growth + 16.0 * _UNIT, float(more.sum())
    error = count * (growth * _norm(more) + 2.0 * _UNIT * mass + _norm(more) * count * each)
    return summed, 1.04 * (error + (growth + 8.0 * _UNIT * count) * _norm(summed)) + _UNDERFLOW


def _norm(values: Array) -> float:
    return math.sqrt(float(np.square(values).sum()))


def _log_sum(logs: Array) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


def masses(s: float, ends: Array) -> tuple[Array, Array]:
    """Return P and Q of the intervals between neighbors of `ends`, ascending, 0 and infinity allowed."""
    with np.errstate(divide="ignore"):
        z: Array = s * np.log(ends)[None] + 0.5 / s
    return normal_masses(z - 1.0 / s)[0], normal_masses(z)[0]


def split(s: float, g: float, points: int, low: float, high: float) -> Array:
    """Return Q-masses at 0, g, ..., points g of X in [low, high]: a cell's are split such that its P and Q stay."""
    at: Array = g * np.arange(points + 1, dtype=np.float64)
    p, q = masses(s, np.clip(at, low, high))
    right = np.clip((p - at[:-1] * q) / g, 0.0, q)
    mass = np.zeros(points + 1)
    mass[:-1] += q - right
    mass[1:] += right
    return mass


def bins(s: float, g: float, points: int) -> tuple[Array, Array]:
    """Return o, o + g, ..., and edges of bins around them whose means are nearly these; o is the mean of [0, g).

    A density that is e^(slope x) between two points has its edge where both sides have them as their means.
    """
    p, q = masses(s, np.array([0.0, g]))
    offset = float(p[0] / q[0]) if q[0] > 1e-290 else 0.5 * g
    at: Array = offset + g * np.arange(points + 1, dtype=np.float64)
    z = s * np.log(at)
    slope = np.clip(np.diff(-0.5 * z * z - 1.5 * np.log(at)), -30.0, 30.0)
    slope = np.where(np.abs(slope) < 1e-3, 1e-3, slope)
    mean = -1.0 / np.expm1(-slope) - 1.0 / slope
    edges = np.concatenate([[0.0], at[:-1] + g * (1.0 - mean), [at[-1] + 0.5 * g]])
    edges[1] = g
    return at, np.maximum.accumulate(edges)


def merged(s: float, at: Array, edges: Array, low: float, high: float, rising: bool) -> Array:
    """Return Q-masses at the points of X in [low, high]: bins, told apart no more, whose mean is moved to the point.

    A bin takes a fraction of a neighbor that lies on the other side of the point, as in `discretize.lower`. Where there
    is too little to take, its mass goes to the next point below its mean, or above it if `rising`.
    """
    ends = np.clip(edges, low, high)
    p, q = masses(s, ends)
    excess = p - at * q
    lack, surplus = np.zeros_like(at), np.zeros_like(at)
    lack[1:] = at[1:] * q[:-1] - p[:-1]  # of the lower neighbor
    surplus[:-1] = p[1:] - at[:-1] * q[1:]  # of the upper one
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.abs(excess) / np.where(excess > 0.0, lack, surplus)
    usable = (share >= 0.0) & (share <= MOST_TAKEN)
    below = np.where(usable & (excess > 0.0), share, 0.0)
    above = np.where(usable & (excess <= 0.0), share, 0.0)
    keeps = kept_parts(below[None], above[None])[0]
    if (keeps < 0.0).any():
        usable[:], below, above, keeps = False, np.zeros_like(at), np.zeros_like(at), np.ones_like(at)
    mass = q.copy()
    mass[1:] += below[1:] * q[:-1]
    mass[:-1] += above[:-1] * q[1:]
    mass *= keeps
    moved = np.where(~usable & ((excess > 0.0) if rising else (excess < 0.0)), mass, 0.0)
    # A bin that reaches beyond the next point may not even have that mean: it is left out.
    fits = ends[1:-1] <= at[1:] if rising else ends[1:-1] >= at[:-1]
    found: Array = mass - moved
    if rising:
        found[1:] += np.where(fits, moved[:-1], 0.0)
    else:
        found[:-1] += np.where(fits, moved[1:], 0.0)
    return found
