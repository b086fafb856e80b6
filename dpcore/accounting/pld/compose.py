"""Composition: the convolution of all steps' losses, exponentially tilted, by the discrete Fourier transform.

Let M(theta) be the product over all steps of sum_k p_k e^(theta l_k), K = log M, and p~ the tilted masses
p_k e^(theta l_k)/M. Tilting commutes with convolution, so the composition has masses c_j e^(K - theta l_j), where c is
the convolution of all p~, and

    delta(eps) = infinite mass + e^K sum_{l_j > eps} c_j e^(-theta l_j) (1 - e^(eps - l_j)).

With theta such that the tilted mean K'(theta) is near eps, the sum is made of the bulk of c, and the rounding error of
c, relative to its largest entries, is relative to delta: a delta of 1e-100 costs no digits.

**Window.** Only N points around the tilted mean are kept, and the transform adds up what lies N apart. For t > 0, the
tilted mass above x is at most exp(K(theta + t) - K(theta) - t x), likewise below. Upper bound: mass aliased into the
window only adds, and the mass above the window, at most B, adds at most e^(K - theta top) B. Lower bound: mass that is
aliased into the window is at most the mass B outside it, and in delta it weighs at most
max_{l > eps} e^(K - theta l)(1 - e^(eps - l)) = e^(K - theta eps) theta^theta/(1 + theta)^(1 + theta).

**Rounding of a transform.** u = 2^-53. Lengths are products of 2, 3, 4 and 5, as scipy's pocketfft passes through them.
A pass multiplies by roots of unity, then adds. It takes each root as the product of two tabulated ones. The angle of
those, at most pi/4, is rounded twice (error pi/2 u), and sine and cosine are assumed to be within one unit in the last
place, as C libraries state (sqrt(2) u); a product of complex numbers is off by sqrt(5) u (Brent, Percival, Zimmermann
2007): together 8.3 u. Multiplying by a root: another sqrt(5) u. The additions of radix 2 add u, those of radix 4, in
two stages, 2 u. Radix 3 has, for s = a + b, t = a - b: c + s, and c - s/2 +- i sqrt(3)/2 t, u for every operation and
for the constant: at most 5.2 u, of the sum of the absolute values of the three as well as of their L2 norm. Radix 5, in
the same way: 9.3 u. The real passes are the complex ones without the half that mirrors the other, doubling is exact,
and the first pass has no roots, which leaves room for the factor 1/N of the way back. So the constants of `_PASSES`,
added up to G, bound the error of a transform F of x in two ways, as in Higham 2002, Section 24.1, whose result is for
radix 2: by G ||F||_2 in the L2 norm, and by G ||x||_1 at every frequency. (Measured, the L2 error is below G/10 from a
thousand points on.)

**Rounding of the composition.** The thickest point of a step is left out of its transform: at index 0 that is its mass,
exactly, and adding it costs u |F_j|, which matters if it has nearly everything. Below, x_i is a step without that
point. |F_ij| <= 1 for tilted masses, so the product of the powers T_i is off by at most sum_i T_i (G ||F_i||_2 + 2 u
sqrt(N)) in L2 (one factor exchanged at a time), and with ||F||_2 = sqrt(N) ||x||_2 the convolution c by

    sum_i T_i (G ||x_i||_2 + 2 u).

Many rare events need more: there F^T is small at nearly all frequencies. With e_i = G ||x_i||_1 + 2 u and
a_i = |F_i| + e_i, larger than the computed as well as the exact value, the product is off by sum_i T_i e_i A/a_i,
A = prod a_i^(T_i). Where all computed |F_i| >= 7/8 that is at most 8/7 sum_i T_i e_i A, with A no more than 1.01 times
the computed product as long as sum_i T_i e_i < 1e-3; elsewhere at most 0.9^(T - 1) sum_i T_i e_i, where T is the least
T_i of a step with ||x_i||_1 > 0.06 (the others are at least 1 - 2 ||x_i||_1 everywhere). In L2 therefore, with the
product p, c is off by at most

    (8/7 ||p||_2/sqrt(N) + 0.9^(T - 1)) sum_i T_i e_i.

The lesser one counts. Powers add 4 T u relative, and the way back G, both times ||c||_2. Call the sum R. What
delta(eps) sums has the weights e^(-theta l)(1 - e^(eps - l)), so by Cauchy and Schwarz it is off by at most

    e^(K - theta eps) R ||(e^(-theta x_j) min(1, x_j))_j||_2,   x_j = l_j - eps > 0  (1 - e^-x <= min(1, x)).

**Many distinct steps.** The composition is smooth, so its transform is negligible but at few frequencies. Every factor
is at most 1 in size, so the product over some of the steps (every so-and-so-many-th) bounds the whole one: where that
product is above 1e-18 at few frequencies, the other steps are evaluated only there, by a matrix product over n points
(error of an entry at most (n + 16) u), and the logarithms of m of them are added up (5 m u for each step, angles being
at most pi). The rest is at most 1e-18 at each frequency, hence 1e-18 in L2 after the transform.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpcore.accounting.pld.loss import Array, Masses

# Log moments of a composition: they say how to tilt it, how wide it is, and how far apart two bounds are.
#
# Any tilt gives valid bounds; the tilts chosen here give sharp ones.


class Moments:
    """K(theta) = log E_P e^(theta L) of a composition, infinite masses left out, and its derivatives."""

    def __init__(self, parts: Sequence[Masses]) -> None:
        self.parts = parts
        with np.errstate(divide="ignore"):
            self._logs = [np.log(part.p) for part in parts]
        self._losses = [part.losses for part in parts]

    def tilted(self, theta: float) -> list[tuple[Array, Array]]:
        """Return the tilted masses (steps, n) and the log moments (steps,) of each part."""
        result = []
        for logs, losses in zip(self._logs, self._losses, strict=True):
            exponent = logs + theta * losses
            top = np.maximum(exponent.max(axis=1, keepdims=True), -1e300)  # a lower bound may have no mass at all
            weights = np.exp(exponent - top)
            total = np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
            result.append((weights / total, (top + np.log(total))[:, 0]))
        return result

    def __call__(self, theta: float) -> tuple[float, float, float]:
        """Return K, K' and K'' at theta."""
        value = mean = variance = 0.0
        for (p, log_moment), losses, part in zip(self.tilted(theta), self._losses, self.parts, strict=True):
            first = (p * losses).sum(axis=1)
            second = (p * (losses - first[:, None]) ** 2).sum(axis=1)
            value += float(part.counts @ log_moment)
            mean += float(part.counts @ first)
            variance += float(part.counts @ second)
        return value, mean, variance

    def log_moment(self, theta: float) -> float:
        """Return K at theta."""
        return float(sum(part.counts @ log for (_, log), part in zip(self.tilted(theta), self.parts, strict=True)))


def saddle(moments: Moments, log_delta: float) -> float:
    """Return the tilt at which delta is about the given one, by the saddle-point formula.

    delta(K'(t)) is about exp(K - t K')/(t (1 + t) sqrt(2 pi K'')), which decreases in t.
    """
    # A bounded loss has no tilt with so small a delta. No loss here has lighter tails than a normal one of a tenth its
    # size.
    least = plain(moments) ** 2
    largest = 20.0 * (3.0 + math.sqrt(-2.0 * log_delta)) / math.sqrt(least)

    def above(theta: float) -> bool:
        value, mean, variance = moments(theta)
        if theta > largest or variance < 1e-4 * least:
            return False
        spread = math.log(theta) + math.log1p(theta) + 0.5 * math.log(2.0 * math.pi * max(variance, 1e-300))
        return value - theta * mean - max(spread, math.log(2.0)) > log_delta

    return _bisect(above)


def tilt_at(moments: Moments, epsilon: float) -> float:
    """Return the tilt at which the mean is epsilon, 0 if it is larger without one."""
    if moments(0.0)[1] >= epsilon:
        return 0.0
    largest = 1e3 / plain(moments)
    return _bisect(lambda theta: theta < largest and moments(theta)[1] < epsilon)


def plain(moments: Moments) -> float:
    """Return the standard deviation of the loss without a tilt, bounded away from 0."""
    _, mean, variance = moments(0.0)
    return max(math.sqrt(variance), 1e-3 * abs(mean), 1e-100)


def _bisect(grow: Callable[[float], bool]) -> float:
    low, high = 0.0, 2.0  # of log theta
    while low > -40.0 and not grow(math.exp(low)):
        low, high = low - 4.0, low
    while high < 60.0 and grow(math.exp(high)):
        low, high = high, high + 4.0
    while high - low > 1e-3:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if grow(math.exp(middle)) else (low, middle)
    return math.exp(0.5 * (low + high))


# delta as a function of epsilon, as read from a composition.


@dataclass(frozen=True)
class Curve:
    """delta at ascending losses, certainly above or below the true one, linear in e^eps in between.

    `values` (n,) are delta at the `losses` (n,), which may begin below 0, without the mass `infinite` at loss infinity,
    in the unit e^`log_scale`. From a point to the next, `slack` (n,), which falls with the loss, has to be subtracted
    (lower bound) or added (upper bound). delta(eps) <= e^(chernoff - theta eps) + infinite is what an upper bound falls
    back on if the curve ends. `size` is the number of points of the transform.
    """

    losses: Array
    log_scale: float
    values: Array
    slack: Array
    infinite: float
    upper: bool
    theta: float
    chernoff: float
    size: int

    def delta(self, epsilon: float) -> float:
        """Return the bound on delta at epsilon: 1 or 0 if the curve ends before it."""
        at, losses = epsilon, self.losses
        if at < losses[0] or at >= losses[-1]:
            # Left of the curve nothing is known above, and its first value holds below; right of it the other way
            # round.
            if self.upper:
                value = math.inf if at < losses[0] else self.values[-1] + self.slack[-1]
            else:
                value = self.values[0] - self.slack[0] if at < losses[0] else 0.0
        else:
            k = int(np.searchsorted(losses, at, side="right")) - 1
            share = math.expm1(at - losses[k]) / math.expm1(losses[k + 1] - losses[k])
            value = self.values[k] + share * (self.values[k + 1] - self.values[k])
            value += self.slack[k] if self.upper else -self.slack[k]
        if math.isnan(value):
            value = math.inf if self.upper else 0.0
        if value <= 0.0:
            return self.infinite
        log_value = math.log(value) + self.log_scale
        if self.upper:
            log_value = min(log_value, self.chernoff - self.theta * epsilon)
        finite = math.exp(log_value) if log_value < 0.0 else 1.0
        return min(1.0, finite + self.infinite)

    def epsilon(self, delta: float) -> float:
        """Return the epsilon at which the bound reaches delta: infinity (upper) or 0 (lower) if it does not."""
        if self.upper and delta <= self.infinite:
            return math.inf
        log_delta = math.log(delta - self.infinite)
        if not self.upper and log_delta - self.log_scale > 700.0:
            return -math.inf
        wanted = math.exp(min(700.0, log_delta - self.log_scale))
        if self.upper:
            limit = max(0.0, self.chernoff - log_delta) / self.theta if self.theta > 0.0 else math.inf
            return min(limit, self._crossing(wanted, self.values + self.slack))
        return self._crossing(wanted, self.values - self.slack)

    def _crossing(self, wanted: float, net: Array) -> float:
        above = np.flatnonzero(net > wanted)
        if not len(above):
            return float(self.losses[0]) if self.upper else -math.inf
        k = int(above[-1])
        if k == len(net) - 1:
            return math.inf if self.upper else float(self.losses[k])
        wanted -= self.slack[k] if self.upper else -self.slack[k]
        drop = self.values[k] - self.values[k + 1]
        share = min(1.0, (self.values[k] - wanted) / drop) if drop > 0.0 else 1.0
        return float(self.losses[k] + math.log1p(share * math.expm1(self.losses[k + 1] - self.losses[k])))


Spectrum = npt.NDArray[np.complex128]

MOST_POINTS = 1 << 20  # of the transform: 8 MiB an array
_OUTSIDE = 26.0  # -log of the tilted mass that may be outside of the window on one side
_UNIT = 2.0**-53
_PASSES = {4: 13.0, 2: 12.0, 3: 16.0, 5: 20.0}  # by radix: bounds on the relative error of a pass, over u
_WHOLE = 48  # distinct steps, at least, that are transformed at all frequencies


def compose(moments: Moments, theta: float, *, upper: bool, eta: float, behind: float = 600.0) -> Curve:
    """Return the curve of the composition at a tilt of 0 or more, accurate near the epsilons where K'(theta) = epsilon.

    `upper` says whether the masses are those of an upper bound, and `eta` is the relative error of the masses of a step
    (see `dpcore.accounting.pld.loss`). The curve begins `behind` below K'(theta).
    """
    h = moments.parts[0].h
    log_total, reference, variance = moments(theta)
    high, low, outside = _window(moments, theta, log_total, reference, variance, h)
    count = high - low
    summed, error, start = _convolve(moments, theta, count)
    # Index j of the transform is point start + j, modulo count; the window begins at round(mean) + low.
    shifts = sum(float(part.counts @ part.offsets[:, 0]) for part in moments.parts)
    first = round((reference - shifts) / h) + low
    summed = np.roll(summed, -((first - start) % count))
    losses: Array = np.asarray(shifts + (first + np.arange(count)) * h, dtype=np.float64)
    steps = float(sum(part.counts.sum() for part in moments.parts))
    # Far from the reference, exponentials leave the range of float64. Points below are left out; mass above counts as
    # infinitely far (upper bound) or as right there (lower bound).
    begin = min(int(np.searchsorted(losses, reference - min(behind, 600.0 / (1.0 + theta)))), count - 2)
    end = max(int(np.searchsorted(losses, reference + 300.0 / (1.0 + 0.5 * theta))), begin + 2)
    with np.errstate(under="ignore"):
        far = np.exp(-theta * (losses[end:] - reference))
        beyond = float(summed[end:] @ far)
    losses, summed = losses[begin:end], summed[begin:end]
    decay, fall = np.exp(-theta * (losses - reference)), np.exp(reference - losses)
    weighted = summed * decay * fall
    if not upper:
        weighted[-1] += beyond * fall[-1]
    tail = np.cumsum(weighted[::-1])[::-1]
    # delta(l_k) - delta(l_(k+1)) = (e^(l_(k+1)) - e^(l_k)) Q(L > l_k): positive terms only.
    with np.errstate(over="ignore", invalid="ignore"):
        growth = tail[1:] / fall[:-1] * math.expm1(h)
        values = np.append(np.cumsum(growth[::-1])[::-1], 0.0)
    log_peak = _log_peak(theta)
    noise = error * _weight_norm(theta, h, count) * decay
    if upper:
        top = shifts + (first + count) * h
        beyond += error * float(np.linalg.norm(far))
        slack = noise + beyond + outside * math.exp(max(-700.0, -theta * (top - reference)))
    else:
        slack = noise + 2.0 * outside * math.exp(log_peak) * decay
    values = np.nan_to_num(values, nan=math.inf if upper else 0.0, posinf=math.inf if upper else 0.0)
    # The cumulative sums, the exponentials and K carry rounding of their own: some N u, and u |exponent|.
    largest = max(float(np.abs(part.losses).max()) for part in moments.parts)
    shift = steps * (eta + 4.0 * largest * _UNIT) * (1.0 if upper else -1.0)
    spare = (4.0 * count + 8.0 * abs(theta * reference) + (64.0 + 8.0 * theta * largest) * steps) * _UNIT
    scale = log_total - theta * reference + (shift + spare if upper else shift - spare)
    infinite = float(sum(part.counts @ part.infinite for part in moments.parts)) if upper else 0.0
    infinite *= (1.0 + 1e-9) * math.exp(max(0.0, shift))
    chernoff = log_total + log_peak + spare + (1.0 + theta) * abs(shift)
    return Curve(losses + shift, scale, values, slack, infinite, upper, theta, chernoff, count)


def _log_peak(theta: float) -> float:
    """Return log of the largest e^(-theta x)(1 - e^-x) over x > 0."""
    return theta * math.log(theta / (1.0 + theta)) - math.log1p(theta) if theta > 0.0 else 0.0


def _weight_norm(theta: float, h: float, count: int) -> float:
    """Return a bound on the L2 norm of e^(-theta x) min(1, x) over x = h, 2h, ..., count h."""
    lost = -math.expm1(-2.0 * theta * h)
    kept = 1.0 - lost
    squares = [float(count), float(count) ** 3 * h * h]
    if lost > 1e-12:
        # sum of r^k and of k^2 r^k
        squares += [kept / lost, h * h * kept * (1.0 + kept) / lost**3]
    return math.sqrt(min(squares))


def _window(
    moments: Moments, theta: float, log_total: float, mean: float, variance: float, h: float
) -> tuple[int, int, float]:
    """Return the end and beginning of the window, in points from the mean, and the tilted mass outside of one side."""
    from scipy.fft import next_fast_len

    rise = _exponents(lambda t: moments.log_moment(theta + t) - log_total - t * mean, variance + h * h)
    fall = _exponents(lambda t: moments.log_moment(theta - t) - log_total + t * mean, variance + h * h)
    high = math.ceil(min((k + _OUTSIDE) / t for t, k in rise) / h) + 3
    low = -math.ceil(min((k + _OUTSIDE) / t for t, k in fall) / h) - 3
    if high - low > MOST_POINTS:
        low = max(low, -(MOST_POINTS // 2))
        high = min(high, low + MOST_POINTS)
    high = low + next_fast_len(high - low, real=True)
    largest = max(float(np.abs(part.losses).max()) for part in moments.parts)
    steps = float(sum(part.counts.sum() for part in moments.parts))
    # Two K, each as in `compose`.
    noise = (128.0 + 16.0 * (theta + max(rise[0][0], fall[0][0])) * largest) * steps * _UNIT
    above = min(k - t * (high - 2) * h for t, k in rise) + noise
    below = min(k + t * (low + 2) * h for t, k in fall) + noise
    return high, low, min(1.0, math.exp(min(0.0, max(above, below))))


def _exponents(excess: Callable[[float], float], variance: float) -> list[tuple[float, float]]:
    """Return pairs (t, log E e^(t (L - mean))); one of them gives a good Chernoff bound.

    The first is best for a normal distribution. For heavier tails smaller ones are tried while they improve the bound.
    """
    t = math.sqrt(2.0 * _OUTSIDE / variance)
    pairs = [(t, excess(t))]
    while len(pairs) < 40:
        t *= 0.7
        pairs.append((t, excess(t)))
        first, second = ((k + _OUTSIDE) / t for t, k in pairs[-2:])
        if second >= first:
            return pairs
    return pairs


def _convolve(moments: Moments, theta: float, count: int) -> tuple[Array, float, int]:
    """Return the convolution modulo `count`, a bound on its L2 error, and the point of index 0."""
    from scipy.fft import irfft, rfft

    growth = transform_error(count)
    product = np.ones(count // 2 + 1, dtype=np.complex128)
    spread, each, least = 0.0, 0.0, math.inf
    parts = list(zip([p for p, _ in moments.tilted(theta)], moments.parts, strict=True))
    middles = [int(part.points[np.argmax(part.counts @ p)]) for p, part in parts]
    steps = sum(int(part.counts.sum()) for part in moments.parts)
    start = sum(int(part.counts.sum()) * middle for (_, part), middle in zip(parts, middles, strict=True))
    pick = max(1, int(sum(len(p) for p, _ in parts) / max(_WHOLE, 3e6 / count)))

    def transform(remainders: range) -> None:
        nonlocal product, spread, each, least
        for (tilted, part), middle in zip(parts, middles, strict=True):
            place = (part.points - middle) % count
            chosen = np.isin(np.arange(len(tilted)) % pick, remainders)
            for p, times in zip(tilted[chosen], part.counts[chosen].tolist(), strict=True):
                folded = np.bincount(place, weights=p, minlength=count)
                thick, folded[0] = folded[0], 0.0
                product *= power(thick + rfft(folded), times)
                mass = float(folded.sum())
                spread += times * (growth * float(np.linalg.norm(folded)) + 2.0 * _UNIT)
                each += times * (growth * mass + 2.0 * _UNIT)
                least = least if mass <= 0.06 else min(least, times)

    transform(range(1))
    heard = np.flatnonzero(np.abs(product) > 1e-18)
    # If many are needed, transforms cost less than matrix products.
    direct = pick > 1 and len(heard) * max(len(part.points) for part in moments.parts) < 48 * count
    if not direct:
        transform(range(1, pick))
    error = spread
    if each < 1e-3:
        norm = float(np.linalg.norm(product)) * math.sqrt(2.0 / count)
        error = min(error, each * (8.0 / 7.0 * norm + 0.9 ** (least - 1.0)))
    if direct:
        error += 2e-18 + 1e-18 * growth
        for (tilted, part), middle in zip(parts, middles, strict=True):
            others = np.arange(len(tilted)) % pick != 0
            if not others.any():
                continue
            place = (part.points - middle) % count
            times = part.counts[others].astype(np.float64)
            for first in range(0, len(heard), 256):
                some = heard[first : first + 256]
                angle = (2.0 * math.pi / count) * (np.multiply.outer(place, some) % count)
                values = tilted[others] @ np.cos(angle) - 1j * (tilted[others] @ np.sin(angle))
                size = times @ np.log(np.maximum(np.abs(values), 1e-300))
                product[some] *= np.exp(np.minimum(size, 0.0) + 1j * (times @ np.angle(values)))
            own = (len(part.points) + 5.0 * len(times) + 16.0) * _UNIT * math.sqrt(2.0 * len(heard) / count)
            error += own * float(times.sum())
        silent = np.ones(len(product), dtype=bool)
        silent[heard] = False
        product[silent] = 0.0
    summed: Array = irfft(product, n=count)
    error += (growth + 4.0 * _UNIT * steps) * float(np.linalg.norm(summed))
    # The terms of second order: up to `each`, which is 0.026 at 2^40 steps.
    return summed, 1.04 * error, start


def transform_error(count: int) -> float:
    """Return a bound on the relative error of a real transform of that length (see the text above)."""
    total, left = 0.0, count
    for radix, error in _PASSES.items():
        while left % radix == 0:
            total, left = total + error, left // radix
    if left > 1:
        raise ValueError(f"count={count}: must have no prime factor above 5")
    return total * _UNIT


def power(base: Spectrum, exponent: int) -> Spectrum:
    """Return base^exponent, exponent at least 1, by repeated squaring; overwrites the base."""
    result: Spectrum | None = None
    with np.errstate(under="ignore"):
        while exponent > 1:
            if exponent & 1:
                result = base.copy() if result is None else np.multiply(result, base, out=result)
            exponent >>= 1
            np.multiply(base, base, out=base)
        return base if result is None else np.multiply(result, base, out=result)
