"""The privacy loss of one epoch of random allocation: an example enters one of t batches, each with probability 1/t.

An adversary's view of the example, whatever the others do, is dominated by t numbers with noise of its own each: all
N(0, 1) under Q, and under P one of them, drawn at random, N(1/s, 1), with s the noise multiplier. (The batch is drawn
before the epoch. The example's addend may depend on earlier releases; but that changes only the direction of a vector,
and the noise looks the same from every side.) With X_i = e^(z_i/s - 1/(2 s^2)) the likelihood ratio is

    L = dP/dQ = (X_1 + ... + X_t) / t,     X_i independent, lognormal, E_Q X_i = 1.

"Remove" has the loss log L under P, "add" the loss -log L under Q. Both curves are expectations of convex functions of
the sum S = t L, so a law of X that is larger in the convex order (a mass is split between two points that keep its
mean) bounds them from above, and one that is smaller (masses are merged at their mean) from below. On a grid of step g
both differ from the true law at second order, and the law of S is a t-fold convolution: one power of a transform. P
needs none of its own: dP = L dQ.

- **Ends.** X above a cap: lost to infinity under P ("remove", upper), moved down to it ("add", upper: the loss grows),
  or left out (lower).
- **Ranges.** Sums are divided by the interval of their largest X, and each kind has its own grid:
  one that reaches to the rare, large X is too coarse for all others. X is split or merged within its interval, so each
  kind's law is larger or smaller in the convex order, and so is the mixture.
- **Tilt.** Q-masses are multiplied by e^(r S), so that those that matter are the large ones, as in `compose`. Several
  tilts bound the same masses; every part of the grid takes the tightest one.
- **Window.** The transform works modulo N points, so mass above W = N g reappears N points lower. By Chernoff, the
  tilted mass above W is at most B = e^(K(v) - v W) for every v > 0, with K the log moment of the tilted sum. Upper
  bound: what reappears only adds mass; what left is put at infinity ("remove") or at the window's end ("add"). Lower
  bound: every point gained at most B, so B is subtracted from every point. Without the tilt, the mass above W is at
  most B e^(-r W) (v >= -r); under P, since S / (t L) <= e^((S - W)/W), it is at most that times L at W (v >= 1/W).
- **Rounding.** With e the L2 error of the transform, as in `compose`, at most sqrt(m) e is moved past any of m points
  in a row: so much is added at the far end of each block, or taken away from there (`moved`). That of the masses
  of X is a relative error of the tail beyond, as in `loss`: scaling X by e^eta covers it, and with X all losses.

References
----------
Chua et al., "Balls-and-Bins Sampling for DP-SGD", 2024 (the pair); Feldman and Shenfeld, "Privacy amplification by
random allocation", 2025. The bounds are ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpcore.accounting.pld.compose import power, transform_error
from dpcore.accounting.pld.loss import MOST_TAKEN, Family, Steps, kept_parts, normal_masses
from dpcore.errors import PrivacyError
from dpcore.spec import special

# The law of the sum of t independent X on a grid, tilted.
#
# The law of one X = e^(z/s - 1/(2 s^2)), z standard normal, is once larger in the convex order, once smaller. Of an
# interval of X, Q is its mass under z, and P = E[X; interval] its mass under z + 1/s, since E X = 1.


Array = npt.NDArray[np.float64]

_UNIT = 2.0**-53
_UNDERFLOW = 1e-290  # above the L2 norm of all that a transform loses below the smallest float64
_LOG_LEAST = -30.0  # of the tilted mass above the window
_TRIES = 24
_RARE = 0.02  # probability that the largest of all X is above the first range
_RATIO, _MOST_RANGES = 16.0, 8  # ratio of the ends of ranges, or larger if there would be more ranges than this


@dataclass(frozen=True)
class TiltedSum:
    """Masses of S at `values` (n,), multiplied by e^(rate S - log_total).

    `error` bounds the L2 norm of what rounding adds, `left` the tilted mass above the window, which the transform folds
    into it, and `beyond` the same without the tilt (if the rate is above 0: weighed by S over the window's end).
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
    """Return intervals up to the cap; the largest X is in one of them, nearly always in the first.

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
    """Return the law of the sum if the largest X is in [low, high], with X `split`, or for a lower bound `merged`.

    That is the law of all X up to `high` without that of all X up to `low`. The curve of "remove" falls with X, that of
    `add` grows: X above the `last` range is left out, or for an upper bound of "add" moved down to its end. The tilt is
    at most `rate`.
    """
    g, wanted = step(t, s, low, high, size, lower, add, last), rate
    values, few, more = _log_masses(s, g, low, high, lower, add, last)
    plain, end = np.logaddexp(few, more), t * float(values[0]) + size * g
    for attempt in range(_TRIES):
        rate = wanted * 0.85**attempt  # a weaker tilt has less above the window
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
    """Return the step of a grid whose window nearly always contains the sum."""
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

    With B and T their transforms and A = B + T: A^t - B^t = T (A^(t-1) + A^(t-2) B + ... + B^(t-1)), which loses no
    digit, however small T is. The sum has t products of t - 1 factors of size 1 at most, each off by `each`.
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
    """Return Q-masses at the points of X in [low, high]: merged bins, whose mean is moved to the point.

    A bin takes a fraction of a neighbor that lies on the other side of the point, as in `loss.lower`. Where there
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
    bins: Array = mass - moved
    if rising:
        bins[1:] += np.where(fits, moved[:-1], 0.0)
    else:
        bins[:-1] += np.where(fits, moved[1:], 0.0)
    return bins


_RANGE = 34.0  # of the tilt's exponent: beyond, a tail that falls slower than the tilt would be everything
_TILTS = (25.0, 8.0, 3.0, 1.0, 0.3, 0.0)  # each is best somewhere
_STEEPEST = 0.5  # tilt from a point of the grid to the next; without a tilt there is always a law
_POINTS = 160  # of the window, for each point per doubling in a grid of losses
_MOST_POINTS = 1 << 18
FAR, _FARTHER = 20.0, 200.0  # times the mean, and the sum of interest: "add" does not distinguish larger ones


@dataclass(frozen=True)
class Law:
    """Losses (n,), ascending, with their P-masses and Q-masses, and the P-mass at infinity."""

    losses: Array
    p: Array
    q: Array
    infinite: float

    def masses(self, edges: Array) -> tuple[Array, Array]:
        """Return the P-mass and the Q-mass (1, n) of each interval of losses, which includes its lower edge."""
        ends = np.searchsorted(self.losses, edges[0])
        filled = np.flatnonzero(ends[1:] > ends[:-1])
        result = np.zeros((2, 1, edges.shape[1] - 1))
        for mass, sums in zip((self.p, self.q), result, strict=True):
            if len(filled):  # sums of positive numbers: no digits are lost in the tails
                begins = np.append(ends[filled], ends[filled[-1] + 1])
                sums[0, filled] = np.add.reduceat(np.append(mass, 0.0), begins)[:-1]
        if edges[0, -1] == np.inf:
            result[0, 0, -1] += self.infinite
        return result[0], result[1]

    def reach(self, below: float, above: float) -> tuple[Array, Array]:
        """Return losses (1, 1) with no more than about these P-masses beyond them."""
        rising, falling = np.cumsum(self.p), np.cumsum(self.p[::-1])
        first = min(int(np.searchsorted(rising, below)), len(rising) - 2)
        last = len(falling) - 1 - min(int(np.searchsorted(falling, above)), len(falling) - 2)
        return self.losses[None, first : first + 1], self.losses[None, max(last, first + 1)][None, None]


@dataclass(frozen=True)
class Allocation(Steps):
    """Epochs of one kind, in the place of a `Family` of steps.

    Attributes
    ----------
    batches : int
        t, 2 or more.
    noise_multiplier : float
    counts : (1,) int64
        Epochs.
    log_rare : float
        Log of the P-mass that may count as lost to infinity.
    theta, loss : float
        Tilt of the composition, and the loss of an epoch that is the mean under it.
    size : int
        Points of the window, about.
    bound : {"upper", "lower", "rough"}
        The last one is none.
    """

    batches: int
    noise_multiplier: float
    counts: npt.NDArray[np.int64]
    log_rare: float
    theta: float = 0.0
    loss: float = 0.0
    size: int = 1 << 13
    bound: str = "upper"

    subset: bool = False

    @property
    def weights(self) -> Array:
        """One, (1, 1): an epoch is no mixture."""
        return np.ones((1, 1))

    @property
    def rates(self) -> Array:
        """The rate of one sampled step with the same chi-squared divergence, (1, 1)."""
        return np.full((1, 1), self.batches**-0.5)

    @property
    def sigmas(self) -> Array:
        """The noise multiplier, (1, 1)."""
        return np.full((1, 1), self.noise_multiplier)

    def of(self, _chosen: npt.NDArray[np.intp], counts: npt.NDArray[np.int64]) -> Allocation:
        """Return the same with other counts."""
        return replace(self, counts=counts)

    def fitted(self, fine: int) -> Allocation:
        """Return the same on a grid that suits a grid of losses with `fine` points per doubling."""
        from scipy.fft import next_fast_len

        return replace(self, size=next_fast_len(min(_MOST_POINTS, _POINTS * fine), real=True))

    def bounded(self, bound: str) -> Allocation:
        """Return the same with another bound; a rough one stays rough."""
        return self if self.bound == "rough" else replace(self, bound=bound)

    def aimed(self, theta: float, loss: float) -> Allocation:
        """Return the same for a tilt of the composition, and the loss of an epoch that is the mean under it."""
        return replace(self, theta=theta, loss=loss)

    def masses(self, direction: str, edges: Array) -> tuple[Array, Array]:
        """Return the P-mass and the Q-mass (1, n) of each loss interval; as those of `Family`."""
        return self.law(direction).masses(edges)

    def reach(self, direction: str, low: float, high: float) -> tuple[Array, Array]:
        """Return losses (1, 1) beyond which P has at most about ndtr(-low) below and ndtr(-high) above."""
        return self.law(direction).reach(float(special.ndtr(-low)), float(special.ndtr(-high)))

    def thick(self, _direction: str) -> Array:
        """Return a loss (1, 1) at which P is thick."""
        return np.zeros((1, 1))

    def law(self, direction: str) -> Law:
        """Return the losses of an epoch."""
        settings = (self.log_rare, self.theta, self.loss, self.size)
        return _law(self.batches, self.noise_multiplier, direction == "remove", self.bound, *settings)


Losses = Family | Allocation
"""Steps of one shape, computed together: `Family` has exact masses, `Allocation` bounds on them."""


@lru_cache(maxsize=8)
def _law(t: int, s: float, remove: bool, bound: str, log_rare: float, theta: float, loss: float, size: int) -> Law:
    quantile = -float(special.ndtri_exp(log_rare - math.log(2.0 if remove else 2.0 * t)))
    cap = math.exp(min(600.0, (quantile + (1.0 / s if remove else 0.0)) / s - 0.5 / s**2))
    # The mean over unlike steps may be a loss that an epoch never has: around such a sum there is no mass.
    loss = min(loss, quantile / s + 0.5 / s**2)
    middle = t * math.exp(loss if remove else -loss)
    cap = cap if remove else min(cap, FAR * t, _FARTHER * middle)
    lost, rare = 0.0, 0.0 if bound == "lower" else math.exp(log_rare)
    ratios, masses_q = [], []
    for low, high in ranges(t, s, cap):
        settings = {"lower": bound == "lower", "add": not remove, "last": high == cap}
        most = _STEEPEST / step(t, s, low, high, size, **settings)
        usual = [share * theta / middle for share in (_TILTS if bound != "rough" else _TILTS[-3:])]
        rates = {min(rate, _RANGE / high) if remove else -rate for rate in usual if rate <= most}
        laws = [transformed(t, s, low, high, rate, size, **settings) for rate in rates]
        q = _bounded(laws, bound, remove, low)
        beyond = min(one.beyond for one in laws)
        if bound == "upper" and remove:
            lost += beyond * float(laws[0].values[-1] + laws[0].g) / t
        elif bound == "upper":
            q[-1] += beyond
        ratios.append(laws[0].values / t)
        masses_q.append(q)
    ratio, q = np.concatenate(ratios), np.concatenate(masses_q)
    order = np.argsort(ratio if remove else -ratio, kind="stable")
    ratio, q = ratio[order], q[order]
    some = ratio > 0.0
    p = ratio * q
    if remove:
        if bound == "upper":
            in_p, in_q = masses(s, np.array([cap, np.inf]))
            lost += float(in_p[0] + (t - 1) * in_q[0])
        return _checked(cut(np.log(ratio[some]), p[some], q[some], lost, rare), bound)
    if bound == "upper":
        lost += float(q[~some].sum())
    return _checked(cut(-np.log(ratio[some]), q[some], p[some], lost, rare), bound)


def _checked(law: Law, bound: str) -> Law:
    """Return the law; refuse an upper bound that has lost mass, and one that is nothing at all."""
    if len(law.p) < 2 or (bound == "upper" and not float(law.p.sum()) + law.infinite >= 1.0 - 1e-9):
        raise PrivacyError("random allocation: float64 does not hold its privacy loss; take the 'rdp' accountant")
    return law


def _bounded(tilts: Sequence[TiltedSum], bound: str, remove: bool, least: float) -> Array:
    """Return masses raised or lowered by a bound on the transform's error, from the tilt with the least error.

    Below `least` there are none.
    """
    steepest = max(abs(one.rate) for one in tilts) * tilts[0].g
    block = int(min(1024.0, max(1.0, 0.5 / max(steepest, 1e-9))))
    some = tilts[0].values >= least * (1.0 - 1e-9) - tilts[0].g
    size = len(tilts[0].sums)
    best, masses_q = np.full(size, np.inf), np.zeros(size)
    for one in tilts:
        margin = math.exp(steepest * block) * (math.sqrt(block) * one.error + (one.left if bound == "lower" else 0.0))
        with np.errstate(over="ignore"):
            here = one.plain(np.full(size, margin))
        # By blocks: a block is of one tilt, the one that is best at its last point.
        last = blocks(here if remove else here[::-1], block)[:, -1:]
        here = (last + np.zeros(block)).reshape(-1)[-size:]
        here = here if remove else here[::-1]
        better = here < best
        sums = np.where(some, one.sums, 0.0)
        if bound == "rough":
            sums = np.where(sums > 8.0 * one.error, sums, 0.0)
        else:
            sums = moved(sums if remove else sums[::-1], block, margin if bound == "upper" else -margin)
            sums = sums if remove else sums[::-1]
        # The exponents of the tilt are rounded before they cancel.
        slip = 2.0**-50 * (abs(one.log_total) + np.abs(one.rate * one.values))
        sums = sums * (1.0 + slip if bound == "upper" else np.maximum(1.0 - slip, 0.0))
        best, masses_q = np.where(better, here, best), np.where(better, one.plain(sums), masses_q)
    if not np.isfinite(best).all():
        raise PrivacyError("random allocation: float64 does not hold its privacy loss; take the 'rdp' accountant")
    masses_q[tilts[0].values < least * (1.0 - 1e-9) - (1.0 + block) * tilts[0].g] = 0.0  # whole blocks without any
    return masses_q


def blocks(values: Array, block: int) -> Array:
    """Return the values in rows of `block`; the first one begins with zeros if they do not fill all rows."""
    return np.concatenate([np.zeros(-len(values) % block), values]).reshape(-1, block)


def moved(sums: Array, block: int, margin: float) -> Array:
    """Return masses with `margin` more in the last point of each block; or so much less, from the last points on.

    An error of L2 norm e moves the mass above any point of a block by at most sqrt(block) e, and within the blocks
    above as much: the curve, a sum with weights that grow, is then covered.
    """
    found = blocks(np.maximum(sums, 0.0), block)
    if margin >= 0.0:
        found[:, -1] += margin
    else:
        from_last = np.cumsum(found[:, ::-1], axis=1)
        kept = np.maximum(from_last + margin, 0.0)
        found = np.diff(kept, axis=1, prepend=0.0)[:, ::-1]
    result: Array = found.reshape(-1)[-len(sums) :]
    return result


def cut(losses: Array, p: Array, q: Array, lost: float, rare: float) -> Law:
    """Return the law with the largest losses, of P-mass `rare` at most, moved to infinity.

    There the error of the transform is more than the mass, and the composition's tilt would make it everything.
    """
    sums = np.cumsum(p[::-1])
    last = len(p) - int(np.searchsorted(sums, rare, side="right"))
    return Law(losses[:last], p[:last], q[:last], lost + (float(sums[len(p) - last - 1]) if last < len(p) else 0.0))
