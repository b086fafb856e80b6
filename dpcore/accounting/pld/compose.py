"""Composition: the convolution of all steps' losses, exponentially tilted, by the discrete Fourier transform.

Let M(theta) be the product over all steps of sum_k p_k e^(theta l_k), K = log M, and p~ the tilted masses
p_k e^(theta l_k)/M. Tilting commutes with convolution, so the composition has masses c_j e^(K - theta l_j), where c is
the convolution of all p~, and

    delta(eps) = infinite mass + e^K sum_{l_j > eps} c_j e^(-theta l_j) (1 - e^(eps - l_j)).

With theta such that the tilted mean K'(theta) is near eps, the sum is made of the bulk of c, and the rounding error of
c, relative to its largest entries, is relative to delta: a delta of 1e-100 costs no digits.

**Window.** Only N points around the tilted mean are kept, and the transform adds up what lies N apart. For t > 0, the
tilted mass above x is at most exp(K(theta + t) - K(theta) - t x), likewise below. Upper bound: what is aliased into the
window only adds, and the mass above the window, at most B, adds at most e^(K - theta top) B. Lower bound: what is
aliased into the window is at most the mass B outside it, and in delta it weighs at most
max_{l > eps} e^(K - theta l)(1 - e^(eps - l)) = e^(K - theta eps) theta^theta/(1 + theta)^(1 + theta).

**Rounding.** With u = 2^-53 and G = 2 u log2(2N), a transform F of x has an error of at most G ||F||_2 in the L2 norm.
(Measured against 64-bit mantissas: at most 0.47 u log2(2N) at lengths from 8 to 2^20, 0.35 from a thousand on. No worst
case: that of Higham 2002, Theorem 24.2, is three times G, for radix 2.) The rest is derived. The thickest point of a
step is left out of that: at index 0 its transform is its mass, exactly, and adding it costs u, which matters where it
holds nearly everything. |F_j| <= 1 for tilted masses, so the product of the powers T_i is off by at most
sum_i T_i (G ||F_i||_2 + 2 u sqrt(N)) in L2, F_i without that point (one factor exchanged at a time), and with
||F||_2 = sqrt(N) ||x||_2 the convolution c by sum_i T_i (G ||x_i||_2 + 2 u). A product of complex numbers is off by
sqrt(5) u (Brent, Percival, Zimmermann 2007), so powers add 4 T u relative, and the way back G, both times ||c||_2. Call
the sum R. What
delta(eps) sums has the weights e^(-theta l)(1 - e^(eps - l)), so by Cauchy and Schwarz it is off by at most

    e^(K - theta eps) R ||(e^(-theta x_j) min(1, x_j))_j||_2,   x_j = l_j - eps > 0  (1 - e^-x <= min(1, x)).

**Many distinct steps.** The composition is smooth, so its transform is negligible but at few frequencies. Every factor
is at most 1 in size, so the product over some of the steps (every so-and-so-many-th) bounds the whole one: the other
steps are evaluated only where that product is above 1e-18, by a matrix product (error of an entry at most (n + 16) u),
and what is left out is at most 1e-18 at each frequency, hence 1e-18 in L2 after the transform.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dpcore.accounting.pld.deltas import Curve
from dpcore.accounting.pld.loss import Array
from dpcore.accounting.pld.moments import Moments

Spectrum = npt.NDArray[np.complex128]

MOST_POINTS = 1 << 20  # of the transform: 8 MiB an array
_OUTSIDE = 26.0  # -log of the tilted mass that may lie outside of the window on one side
_UNIT = 2.0**-53
FOURIER = 2.0  # of the relative L2 error of a transform, over u log2(2N)
_WHOLE = 48  # distinct steps, at least, that are transformed at all frequencies


def compose(moments: Moments, theta: float, *, upper: bool, eta: float, behind: float = 600.0) -> Curve:
    """Return the curve of the composition, accurate near the epsilons where K'(theta) = epsilon.

    Parameters
    ----------
    moments : Moments
        Of what is composed.
    theta : float
        Tilt, 0 or more.
    upper : bool
        Whether the masses are those of an upper bound.
    eta : float
        Relative error of the masses of a step (see `discretize`).
    behind : float
        How far below K'(theta) the curve is asked for.
    """
    h = moments.parts[0].h
    log_total, mean, variance = moments(theta)
    reference = mean
    high, low, outside = _window(moments, theta, log_total, mean, variance, h)
    count = high - low
    summed, error, start = _convolve(moments, theta, count)
    # Index j of the transform stands for point start + j, modulo count; the window begins at round(mean) + low.
    shifts = sum(float(part.counts @ part.offsets[:, 0]) for part in moments.parts)
    first = round((mean - shifts) / h) + low
    summed = np.roll(summed, -((first - start) % count))
    losses: Array = np.asarray(shifts + (first + np.arange(count)) * h, dtype=np.float64)
    steps = float(sum(part.counts.sum() for part in moments.parts))
    # Far from the reference, exponentials leave the range of float64. Points below are left out; mass above counts as
    # infinitely far (upper bound) or as right there (lower bound).
    begin = min(int(np.searchsorted(losses, reference - min(behind, 600.0 / (1.0 + theta)))), count - 2)
    end = max(int(np.searchsorted(losses, reference + 300.0 / (1.0 + 0.5 * theta))), begin + 2)
    with np.errstate(under="ignore"):
        beyond = float(summed[end:] @ np.exp(-theta * (losses[end:] - reference)))
    losses, summed = losses[begin:end], summed[begin:end]
    decay, fall = np.exp(-theta * (losses - reference)), np.exp(reference - losses)
    weighted = summed * decay * fall
    if not upper:
        weighted[-1] += beyond * fall[-1]
    tail = np.cumsum(weighted[::-1])[::-1]
    # delta(l_k) - delta(l_(k+1)) = (e^(l_(k+1)) - e^(l_k)) Q(L > l_k): positive terms only.
    with np.errstate(over="ignore", invalid="ignore"):
        growth = tail[1:] / fall[:-1] * math.expm1(min(h, 700.0))
        values = np.append(np.cumsum(growth[::-1])[::-1], 0.0)
    log_peak = _log_peak(theta)
    noise = error * _weight_norm(theta, h, count) * decay
    if upper:
        top = shifts + (first + count) * h
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
    moved: Array = losses + shift
    return Curve(moved, scale, values, slack, infinite, upper, theta, chernoff, count)


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
    """Return where the window ends and begins, in points from the mean, and the tilted mass outside of one side."""
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
    """Return pairs (t, log E e^(t (L - mean))) of which one or other gives a good Chernoff bound.

    The first is best for a normal distribution. For heavier tails smaller ones are tried while they improve the bound.
    """
    t = math.sqrt(2.0 * _OUTSIDE / variance)
    found = [(t, excess(t))]
    while len(found) < 40:
        t *= 0.7
        found.append((t, excess(t)))
        first, second = ((k + _OUTSIDE) / t for t, k in found[-2:])
        if second >= first:
            return found
    return found


def _convolve(moments: Moments, theta: float, count: int) -> tuple[Array, float, int]:
    """Return the convolution modulo `count`, a bound on its L2 error, and the point that index 0 stands for."""
    from scipy.fft import irfft, rfft

    growth = FOURIER * _UNIT * math.log2(2.0 * count)
    product = np.ones(count // 2 + 1, dtype=np.complex128)
    error, steps, start = 0.0, 0, 0
    parts = list(zip([p for p, _ in moments.tilted(theta)], moments.parts, strict=True))
    middles = [int(part.points[np.argmax(part.counts @ p)]) for p, part in parts]
    pick = max(1, int(sum(len(p) for p, _ in parts) / max(_WHOLE, 3e6 / count)))
    for (tilted, part), middle in zip(parts, middles, strict=True):
        place = (part.points - middle) % count
        for p, times in zip(tilted[::pick], part.counts[::pick].tolist(), strict=True):
            folded = np.bincount(place, weights=p, minlength=count)
            thick, folded[0] = folded[0], 0.0
            product *= _power(thick + rfft(folded), times)
            error += times * (growth * float(np.linalg.norm(folded)) + 2.0 * _UNIT)
        steps += int(part.counts.sum())
        start += int(part.counts.sum()) * middle
    if pick > 1:
        heard = np.flatnonzero(np.abs(product) > 1e-18)
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
                transform = tilted[others] @ np.cos(angle) - 1j * (tilted[others] @ np.sin(angle))
                size = times @ np.log(np.maximum(np.abs(transform), 1e-300))
                product[some] *= np.exp(np.minimum(size, 0.0) + 1j * (times @ np.angle(transform)))
            own = (len(part.points) + 16.0) * _UNIT * math.sqrt(2.0 * len(heard) / count)
            error += own * float(times.sum())
        silent = np.ones(len(product), dtype=bool)
        silent[heard] = False
        product[silent] = 0.0
    summed: Array = irfft(product, n=count)
    error += (growth + 4.0 * _UNIT * steps) * float(np.linalg.norm(summed))
    return summed, 1.01 * error, start


def _power(base: Spectrum, exponent: int) -> Spectrum:
    """Return base^exponent, exponent at least 1, by repeated squaring; overwrites the base."""
    result: Spectrum | None = None
    with np.errstate(under="ignore"):
        while exponent > 1:
            if exponent & 1:
                result = base.copy() if result is None else np.multiply(result, base, out=result)
            exponent >>= 1
            np.multiply(base, base, out=base)
        return base if result is None else np.multiply(result, base, out=result)
