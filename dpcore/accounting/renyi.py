"""Renyi differential privacy of the events, and the accountant built on it.

A schedule has many different steps, and is evaluated at only as many orders as it takes to find the best one. With
K(alpha) the sum of the steps' log A (convex in alpha), the bounds of the conversion below are

    epsilon = (K(alpha) + (alpha - 1) log(1 - 1/alpha) - log alpha - log delta) / (alpha - 1),
    log delta = K(alpha) + (alpha - 1) log(1 - 1/alpha) - log alpha - epsilon (alpha - 1).

(alpha - 1) log(1 - 1/alpha) - log alpha = (alpha - 1) log(alpha - 1) - alpha log alpha has second derivative
1/(alpha - 1) - 1/alpha > 0. So log delta is convex in alpha; and {epsilon <= e} = {convex function <= e (alpha - 1)} is
an interval, so epsilon has no local minimum but the least. The search narrows the orders down between the neighbors
of the best of some. Its bound holds at whichever order it ends. The bounds by Kullback-Leibler divergence get better
with smaller alpha, and the smallest order is among the first.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpcore.accounting.events import Composed, Event, PrivateSelection, SelfComposed
from dpcore.accounting.phases import LEAST_ALLOCATED, AllocationStep, PoissonStep, Step, demand_phases, parts_of, phases
from dpcore.accounting.pld.allocation import FAR, ranges, transformed
from dpcore.accounting.run_law import continuation, mean_of
from dpcore.spec import special

# Conversion of Renyi differential privacy to (epsilon, delta) and back.
#
# Let L be the privacy loss and R(alpha) bound the Renyi divergence of order alpha > 1. Then, for every alpha,
#
#     (improved)  delta(eps) <= exp((alpha - 1)(R - eps)) * (1 - 1/alpha)^(alpha - 1) / alpha
#                             = exp((alpha - 1)(R - eps + log(1 - 1/alpha)) - log alpha)
#     (KL)        delta(0)   <= sqrt(1 - exp(-R))
#
# The first follows from delta(eps) = E[max(0, 1 - exp(eps - L))] and max(0, 1 - e^(-x)) <= e^((alpha-1) x) max_y ((1 -
# e^-y) e^(-(alpha-1) y)), whose maximum lies at e^-y = 1 - 1/alpha. The second is the Bretagnolle-Huber inequality,
# with KL <= R at any order above 1; it gives epsilon = 0 for a divergence of almost nothing.
#
# References
# ----------
# Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", 2020, Proposition 12.
# Asoodeh, Liao, Calmon, Kosut, Sankar, "A Better Bound Gives a Hundred Rounds: Enhanced Privacy Guarantees via
# f-Divergences", 2020, equation 20 (of its first version on arXiv).


Array = npt.NDArray[np.float64]


def epsilon_from_rdp(orders: Array, rdp: Array, delta: float) -> float:
    """Return the smallest epsilon over the orders, each above 1.

    `rdp` (m,) bounds the divergence at the orders: 0 or more, possibly infinity.
    """
    bound = rdp + np.log1p(-1.0 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1.0)
    bound = np.where(delta * delta > -np.expm1(-rdp), 0.0, bound)
    return max(0.0, float(_known(bound).min()))


def log_delta_from_rdp(orders: Array, rdp: Array, epsilon: float) -> float:
    """Return the logarithm of the smallest delta over the orders, above 0 if they give no bound."""
    improved = (orders - 1.0) * (rdp - epsilon + np.log1p(-1.0 / orders)) - np.log(orders)
    with np.errstate(divide="ignore"):
        by_kl = 0.5 * np.log(-np.expm1(-rdp))
    return float(_known(np.minimum(improved, by_kl)).min())


def _known(bounds: Array) -> Array:
    """Return upper bounds with infinity for each that float64 cannot compute: `max(0.0, nan)` would be no bound."""
    return np.where(np.isnan(bounds), np.inf, bounds)


# Moments of the Poisson-subsampled Gaussian.
#
# With noise multiplier s and sample rate q let P = (1-q) N(0, s^2) + q N(1, s^2) and Q = N(0, s^2). Removing one
# example turns P into Q (one dimension is enough: both are the same in all directions orthogonal to the example's
# clipped vector, and a shorter vector only helps). The Renyi divergence of order alpha is log A(alpha) / (alpha - 1)
# with
#
#     A(alpha) = E_{z ~ Q}[(1 + u(z))^alpha],   u(z) = q (exp((2z - 1) / (2 s^2)) - 1),   E[u] = 0.
#
# Mironov, Talwar and Zhang (2019, section 3) show that D(P||Q) >= D(Q||P), so A covers both directions of add-remove.
# Everything here works with A - 1, whose parts are all positive, so that tiny divergences keep their digits:
#
# - integer alpha: A - 1 = sum_{k=2..alpha} binom(alpha, k) q^k (1-q)^(alpha-k) (exp((k^2 - k)/(2 s^2)) - 1);
# - any alpha: A - 1 = E[(1+u)^alpha - 1 - alpha u], by quadrature.
#
# For sigma >= 0.2 the trapezoidal rule serves, which converges geometrically. The integrand is analytic in the strip
# |Im z| < pi s^2 (where 1 + u first vanishes), and at height d in it at most about exp(d^2 / (2 s^2)) times as large as
# on the real line, so that step h leaves a relative error of about exp(-2 pi d / h + d^2 / (2 s^2)) for every d up to
# pi s^2.
#
# For less noise the step would have to shrink like s^2. There the mixture is one-sided except near the point z0 where
# both halves weigh the same: with t = (z - z0) / s^2, 1 + u = (1-q)(1 + e^t). For |t| > 40 one of the two terms is the
# other's rounding error and the integral is a Gaussian tail in closed form; Gauss-Legendre panels cover the rest at any
# sigma.
#
# References
# ----------
# Mironov, Talwar, Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism", 2019, section 3.
# Trefethen, Weideman, "The Exponentially Convergent Trapezoidal Rule", 2014, Theorem 5.1.


_TAIL = 14.0  # standard deviations kept on each side: exp(-98) is left out
_SMALL_SIGMA = 0.2
_REACH = 40  # of t; exp(-40) is less than the rounding of 1
_LARGEST_FRACTIONAL = 32.0
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(16)


@lru_cache(maxsize=8)
def binomial_terms(orders: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], Array, Array, npt.NDArray[np.int64]]:
    """Return, for one alpha after the other, k = 2..alpha, alpha - k, log binom(alpha, k), and each alpha's start."""
    k = np.concatenate([np.arange(2, alpha + 1) for alpha in orders])
    alpha = np.repeat(np.array(orders, np.int64), np.array(orders) - 1)
    table = special.gammaln(np.arange(max(orders) + 1) + 1.0)
    starts = np.concatenate([[0], np.cumsum(np.array(orders) - 1)[:-1]])
    return k, (alpha - k).astype(np.float64), table[alpha] - table[k] - table[alpha - k], starts


def log_moments_integer(q: float, sigma: float, orders: tuple[int, ...]) -> Array:
    """Return log A at integer orders of at least 2, for 0 < q < 1 and sigma > 0."""
    k, rest, log_binomial, starts = binomial_terms(orders)
    top = np.arange(2.0, max(orders) + 1.0)
    growth = top * (top - 1.0) / (2.0 * sigma * sigma)
    log_growth = growth + np.log(-np.expm1(-growth))  # log(exp(growth) - 1) without overflow
    return _one_and(log_binomial + k * math.log(q) + rest * math.log1p(-q) + log_growth[k - 2], starts)


def _one_and(terms: Array, starts: npt.NDArray[np.int64]) -> Array:
    """Return log(1 + the sum of e^terms) of each alpha's terms, which begin at `starts`."""
    peak = np.maximum.reduceat(terms, starts)
    sums = np.add.reduceat(np.exp(terms - np.repeat(peak, np.diff(starts, append=terms.size))), starts)
    return np.asarray(np.logaddexp(0.0, peak + np.log(sums)))


def log_moments_exact(q: float, sigma: float, orders: Array) -> Array:
    """Return log A at real orders above 1 by quadrature, for 0 < q < 1 and sigma > 0.

    Relative error below 1e-12. Above order 32, where integers are dense enough, a fractional order gets an upper bound
    instead: log A is convex in alpha, so the chord between the neighboring integers lies above it.
    """
    result = np.empty_like(orders)
    high = orders > _LARGEST_FRACTIONAL
    if high.any():
        result[high] = _chord(q, sigma, orders[high])
    if not high.all():
        quadrature = _window if sigma < _SMALL_SIGMA else _trapezoid
        result[~high] = np.logaddexp(0.0, quadrature(q, sigma, orders[~high]))
    return result


def _trapezoid(q: float, sigma: float, orders: Array) -> Array:
    """Return log(A - 1) by the trapezoidal rule over all z that matter."""
    height = min(math.pi * sigma * sigma, 9.0 * sigma)
    step = min(sigma / 2.5, 2.0 * math.pi * height / (44.0 + 0.5 * (height / sigma) ** 2))  # error exp(-44)
    low, high = -_TAIL * sigma, float(orders.max()) + _TAIL * sigma
    z = low + step * np.arange(math.ceil((high - low) / step) + 1, dtype=np.float64)
    exponent = (2.0 * z - 1.0) / (2.0 * sigma * sigma)
    u = q * np.expm1(np.minimum(exponent, 600.0))  # if it is cut, only log_ratio is used
    log_ratio = np.where(u < 0.5, np.log1p(np.minimum(u, 0.5)), np.logaddexp(math.log1p(-q), math.log(q) + exponent))
    terms = _log_density(z, sigma) + math.log(step) + _log_excess(u, log_ratio, orders[:, None])
    return np.asarray(special.logsumexp(terms, axis=1))


def _window(q: float, sigma: float, orders: Array) -> Array:
    """Return log(A - 1) from the two Gaussian tails and the window |t| <= 40 between them."""
    variance, alpha = sigma * sigma, orders[:, None]
    log_q, log_p = math.log(q), math.log1p(-q)
    middle = variance * (log_p - log_q) + 0.5
    left, right = middle - _REACH * variance, middle + _REACH * variance
    t = (np.arange(-_REACH, _REACH)[:, None] + 0.5 * (_NODES + 1.0)).ravel().astype(np.float64)
    # Weights are s^2 w / 2 in z, on panels of width 1 in t.
    log_weight = np.tile(np.log(0.5 * _NODE_WEIGHTS), 2 * _REACH) + math.log(variance)
    u = math.exp(log_p) * np.exp(t) - q
    log_ratio = np.where(u < 0.5, np.log1p(np.minimum(u, 0.5)), log_p + np.logaddexp(0.0, t))
    inner = special.logsumexp(
        _log_density(middle + variance * t, sigma) + log_weight + _log_excess(u, log_ratio, alpha), axis=1
    )
    # Left of the window u = -q. Right of it (1+u)^alpha = (q w)^alpha with w the ratio of densities, and E[w^a; z >
    # right] is exp(a (a-1) / (2 s^2)) times the mass of N(a, s^2) beyond `right`, for a = alpha, 1 and 0.
    outer_left = _log_excess(np.array(-q), np.array(log_p), orders) + special.log_ndtr(left / sigma)
    tails = np.stack(
        [
            orders * log_q + orders * (orders - 1.0) / (2.0 * variance) + special.log_ndtr((orders - right) / sigma),
            np.log(orders) + log_q + special.log_ndtr((1.0 - right) / sigma),
            np.log(np.abs(1.0 - orders * q) + 1e-300) + special.log_ndtr(-right / sigma),
        ]
    )
    signs = np.stack([np.ones_like(orders), -np.ones_like(orders), -np.sign(1.0 - orders * q)])
    outer_right, sign = special.logsumexp(tails, axis=0, b=signs, return_sign=True)
    outer_right = np.where(sign > 0.0, outer_right, -np.inf)
    return np.asarray(special.logsumexp(np.stack([inner, outer_left, outer_right]), axis=0))


def _log_density(z: Array, sigma: float) -> Array:
    return np.asarray(-0.5 * (z / sigma) ** 2 - 0.5 * math.log(2.0 * math.pi) - math.log(sigma))


def _log_excess(u: Array, log_ratio: Array, alpha: Array) -> Array:
    """Return log((1+u)^alpha - 1 - alpha u), given log(1+u), without cancellation; -inf at u = 0."""
    # Small u: the binomial series from its second term on. |alpha u| <= 0.02 makes ten terms more than enough.
    small = np.minimum(np.maximum(u, -0.02 / alpha), 0.02 / alpha)
    series = np.ones_like(small)
    for j in range(10, 2, -1):
        series = 1.0 + (alpha - j + 1.0) / j * small * series
    near = 0.5 * alpha * (alpha - 1.0) * small * small * series
    middle = np.expm1(alpha * np.minimum(log_ratio, 1.0)) - alpha * np.minimum(u, math.e)
    with np.errstate(divide="ignore"):
        result = np.log(np.where(np.abs(alpha * u) <= 0.02, near, np.maximum(middle, 0.0)))
    # Large u: (1+u)^alpha taken out, with 1 + alpha u = (1 - alpha) + alpha (1 + u).
    far = np.maximum(log_ratio, 1.0)
    rest = (alpha - 1.0) * np.exp(-alpha * far) - alpha * np.exp(-(alpha - 1.0) * far)
    return np.where(log_ratio > 1.0, alpha * far + np.log1p(np.maximum(rest, -1.0 + 1e-300)), result)


def _chord(q: float, sigma: float, orders: Array) -> Array:
    """Return, at orders above 2, the line between log A at the neighboring integers."""
    below = np.floor(orders)
    left = log_moments_integer(q, sigma, tuple(int(order) for order in below))
    right = log_moments_integer(q, sigma, tuple(int(order) + 1 for order in below))
    return np.asarray(left + (orders - below) * (right - left))


# Moments of the Gaussian on a subset of fixed size, drawn without replacement, under replace-one.
#
# With noise multiplier s relative to the sensitivity under replacement and q = batch size / data set size, and with r
# the likelihood ratio of N(1, s^2) to N(0, s^2), so that
#
#     M_k = E[r^k] = exp((k^2 - k) / (2 s^2)),    B_l = E[(r - 1)^l]  (l even),
#
# Theorem 27 of Wang, Balle and Kasiviswanathan bounds A(alpha) = exp((alpha - 1) D_alpha) at integer alpha:
#
#     A <= 1 + q^2 binom(alpha, 2) min(4 (M_2 - 1), 2 M_2)
#            + sum_{j=3..alpha} q^j binom(alpha, j) min(4 sqrt(B_{2 floor(j/2)} B_{2 ceil(j/2)}), 2 M_j).
#
# Above order 256 only 2 M_j is used, as in dp-accounting 0.6, so that both give the same figures. A fractional order
# gets the chord between the integers around it (log A is convex, and 0 at order 1; Corollary 10).
#
# B_l by differences of M_k loses all digits where s is large. Here it is the integral of a function that is positive:
#
#     B_l = E_{z ~ N(0, 1)}[(exp(w) - 1)^l],   w = z/s - 1/(2 s^2).
#
# On either side of w = 0 the logarithm of the integrand is concave with a second derivative of at most -1, and its
# peaks lie between -(sqrt(l) + 1) and l/s + sqrt(l) + 1: 14 beyond them leaves out exp(-98). At height d above the real
# line it is at most about exp(d^2) times as large as on it, so the trapezoidal rule with step h has relative error
# exp(-(pi/h)^2).
#
# For s^2 <= 1/log 4 the minimum is 2 M_j at every j > 2 and no integral is needed: by Bernoulli (r - 1)^l >= r^l - l
# r^(l-1), so B_l >= M_l (1 - l exp(-(l-1)/s^2)) >= M_l / 2, and sqrt(M_{j-1} M_{j+1}) >= M_j.
#
# References
# ----------
# Wang, Balle, Kasiviswanathan, "Subsampled Renyi Differential Privacy and Analytical Moments Accountant", 2019,
# Theorem 27 and Corollary 10.


_MOST = 256  # the last order with B_l, and with moments of random allocation
_NODE_STEP = 0.25
_BEYOND = 14.0


def log_moments_without_replacement(q: float, sigma: float, orders: Array) -> Array:
    """Return upper bounds on log A at orders above 1, for 0 < q < 1 and sigma > 0."""
    below = np.floor(orders)
    left = np.zeros_like(orders)  # log A(1) = 0
    left[below > 1.0] = _at_integers(q, sigma, below[below > 1.0])
    right = left.copy()
    fractional = orders > below
    right[fractional] = _at_integers(q, sigma, below[fractional] + 1.0)
    return np.asarray(left + (orders - below) * (right - left))


def _at_integers(q: float, sigma: float, orders: Array) -> Array:
    result = np.empty_like(orders)
    for chosen in (orders <= _MOST, orders > _MOST):
        if chosen.any():
            alphas = tuple(int(order) for order in orders[chosen])
            k, _, log_binomial, starts = binomial_terms(alphas)
            bounds = _log_bounds(sigma, max(alphas))
            result[chosen] = _one_and(log_binomial + k * math.log(q) + bounds[k - 2], starts)
    return result


def _log_bounds(sigma: float, largest: int) -> Array:
    """Return the logarithms of the minima in the sum, for j = 2..largest."""
    j = np.arange(2.0, largest + 1.0)
    bounds = math.log(2.0) + j * (j - 1.0) / (2.0 * sigma * sigma)
    growth = 1.0 / (sigma * sigma)
    bounds[0] = min(bounds[0], math.log(4.0) + growth + math.log(-math.expm1(-growth)))
    if largest <= _MOST and growth < math.log(4.0):
        even = _log_even_moments(sigma)  # of l = 2, 4, ...
        low, high = even[j.astype(int) // 2 - 1], even[(j.astype(int) + 1) // 2 - 1]
        bounds[1:] = np.minimum(bounds[1:], math.log(4.0) + 0.5 * (low + high)[1:])
    return bounds


@lru_cache(maxsize=4096)
def _log_even_moments(sigma: float) -> Array:
    """Return log B_l for l = 2, 4, ..., 256."""
    powers = np.arange(2.0, _MOST + 1.0, 2.0)
    low = -(math.sqrt(_MOST) + 1.0 + _BEYOND)
    high = _MOST / sigma - low
    z = low + _NODE_STEP * np.arange(math.ceil((high - low) / _NODE_STEP) + 1, dtype=np.float64)
    w = z / sigma - 0.5 / (sigma * sigma)
    with np.errstate(divide="ignore"):
        log_size = np.maximum(w, 0.0) + np.log(-np.expm1(-np.abs(w)))  # of exp(w) - 1
    log_weight = -0.5 * z * z - 0.5 * math.log(2.0 * math.pi) + math.log(_NODE_STEP)
    return np.asarray(special.logsumexp(powers[:, None] * log_size + log_weight, axis=1))


# Moments of an epoch of random allocation: L = (X_1 + ... + X_t) / t, X_i = e^(z_i/s - 1/(2 s^2)) independent.
#
# "Remove", at an integer order a: E_Q L^a, from the exponential generating function of the moments of a sum,
#
#     E (X_1 + ... + X_t)^a / a! = [x^a] (sum_j E[X^j] x^j / j!)^t,     E X^j = e^(j (j - 1) / (2 s^2)):
#
# positive terms only. "Add": E_Q L^(-b) with b = a - 1. For any l > 0 the function u^(-b) is at most its tangent at l
# below l, which together with u^(-b) above is convex, plus u^(-b) below l. The first part is not more than under a law
# that is larger in the convex order (`dpcore.accounting.pld.allocation`). The second: L is at least the geometric mean
# of the X_i, so E L^(-c) <= e^(c^2 / (2 s^2 t) + c / (2 s^2)), and for c > b
#
#     E[L^(-b); L < l] <= l^(c - b) E L^(-c),     least at c = s^2 t k,  k = -log l - 1/(2 s^2).
#
# l is chosen such that this is below e^-40. Above order 256, and wherever it is less, there is the divergence of the
# Gaussian mechanism in which the example always takes part. The logs of both moments are convex in the order and 0 at
# order 1: a fractional order gets the chord.


_NEGLIGIBLE = 40.0
_SIZE = 1 << 15


def log_moments_allocation(batches: int, sigma: float, orders: Array) -> Array:
    """Return upper bounds on (order - 1) times the divergence of an epoch, of both directions, at orders above 1."""
    whole = orders * (orders - 1.0) / (2.0 * sigma**2)
    if sigma < LEAST_ALLOCATED:
        return whole
    known = np.concatenate([[0.0], np.maximum(_remove(batches, sigma), _add(batches, sigma))])
    inside = orders <= _MOST
    whole[inside] = np.minimum(whole[inside], np.interp(orders[inside], np.arange(1.0, _MOST + 1), known))
    return whole


@lru_cache(maxsize=64)
def _remove(t: int, sigma: float) -> Array:
    """Return log E L^a for a = 2 .. 256."""
    j = np.arange(_MOST + 1.0)
    logs = j * (j - 1.0) / (2.0 * sigma**2) - special.gammaln(j + 1.0)
    power = np.where(j == 0.0, 0.0, -np.inf)
    for digit in bin(t)[2:]:
        power = _product(power, power)
        if digit == "1":
            power = _product(power, logs)
    result: Array = (power + special.gammaln(j + 1.0) - j * math.log(t))[2:]
    return result


def _product(first: Array, second: Array) -> Array:
    """Return the log coefficients of the product of two series."""
    from scipy.linalg import toeplitz

    table = toeplitz(second, np.full(len(second), -np.inf)) + first
    result: Array = special.logsumexp(table, axis=1)
    return result


@lru_cache(maxsize=64)
def _add(t: int, sigma: float) -> Array:
    """Return a bound on log E L^(1 - a) for a = 2 .. 256."""
    result = np.empty(_MOST - 1)
    values, plain = _masses(t, sigma, 0.0)
    losses, mass = -np.log(np.maximum(values, 1e-300) / t), plain
    for place, b in enumerate(range(1, _MOST)):
        if b & (b - 1) == 0:  # a tilt for all orders up to twice its own; each law bounds the same masses
            mass = np.minimum(plain, _masses(t, sigma, -b / t)[1])
        spread = sigma**2 * t
        k = (b + math.sqrt(b * b + 2.0 * spread * (_NEGLIGIBLE + 0.5 * b / sigma**2))) / spread
        least = -k - 0.5 / sigma**2  # log l
        inside = losses <= -least
        above = b * losses[inside] + np.log(np.maximum(mass[inside], 1e-300))
        below = -b * least + math.log1p(b) + math.log(max(float(mass[~inside].sum()), 1e-300))
        result[place] = special.logsumexp(np.append(above, [below, -_NEGLIGIBLE]))
    return result


def _masses(t: int, sigma: float, rate: float) -> tuple[Array, Array]:
    """Return values of the sum, and upper bounds on their masses in a larger convex order."""
    values, mass = [], []
    for low, high in ranges(t, sigma, FAR * t):
        law = transformed(t, sigma, low, high, rate, _SIZE, lower=False, add=True, last=high == FAR * t)
        here = law.plain(np.maximum(law.sums, 0.0) + law.error)
        here[-1] += law.beyond
        values.append(law.values)
        mass.append(here)
    return np.concatenate(values), np.concatenate(mass)


# A superset of dp-accounting's default orders (1.1 to 10.9 by 0.1, 11 to 63, 128, 256, 512, 1024), so that the minimum
# over them is never above its; finer below 1.1 for large epsilons, and above 63 for small ones.
DEFAULT_ORDERS: tuple[float, ...] = tuple(
    sorted(
        {1.0 + x / 10.0 for x in range(1, 100)}
        | {1.01, 1.025, 1.05, 1.075, 1.15, 1.25, 1.35, 1.45}
        | {float(x) for x in range(11, 257)}
        | {float(x) for x in (288, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 8192)}
    )
)

_FEW, _AT_ONCE = 8, 12  # more kinds of steps than the first are a schedule, evaluated at the second's orders at once


@dataclass(frozen=True)
class RdpAccountant:
    """Renyi accountant: adds divergences up at each of `DEFAULT_ORDERS`, then takes the best order.

    Each epsilon is an upper bound, up to float64 rounding (relative 1e-12). Of schedules with many different steps not
    every order is tried, only those on the way to the best one.
    """

    name = "rdp"
    floor = (
        f"RDP at orders up to {DEFAULT_ORDERS[-1]:g} finds nothing between 0 and "
        f"log(1/({DEFAULT_ORDERS[-1]:g} delta))/{DEFAULT_ORDERS[-1] - 1:g}"
    )

    def supports(self, event: Event) -> bool:
        """Whether every part of the event is of a kind known here."""
        plain, selections = _without_selections(event)
        return all(phases(each) is not None for each in (plain, *(selection.run for selection, _ in selections)))

    def epsilon(self, event: Event, delta: float) -> float:
        """Return the smallest epsilon over the orders."""
        return _best(event, lambda orders, rdp: epsilon_from_rdp(orders, rdp, delta))

    def delta(self, event: Event, epsilon: float) -> float:
        """Return the smallest delta over the orders."""
        return math.exp(min(0.0, _best(event, lambda orders, rdp: log_delta_from_rdp(orders, rdp, epsilon))))


def _best(event: Event, bound: Callable[[Array, Array], float]) -> float:
    """Return the least of a bound over the orders, given them and the divergences at them."""
    orders = np.array(DEFAULT_ORDERS)
    plain, selections = _without_selections(event)
    if selections or len(demand_phases(plain).steps) <= _FEW:
        return bound(orders, event_rdp(event, orders))
    low, high, least = 0, len(orders) - 1, math.inf
    while True:
        places = np.unique(np.linspace(low, high, _AT_ONCE).round().astype(np.int64))
        rdp = event_rdp(event, orders[places])
        values = [bound(orders[[place]], rdp[[i]]) for i, place in enumerate(places)]
        best, least = int(np.argmin(values)), min(least, *values)
        if places.size == high - low + 1:
            return least
        low, high = int(places[max(best - 1, 0)]), int(places[min(best + 1, places.size - 1)])


def event_rdp(event: Event, orders: Array) -> Array:
    """Return a bound on the event's Renyi divergence at each order above 1: (m,) float64, infinity without noise.

    Raises
    ------
    PrivacyError
        If the event is not covered.
    """
    plain, selections = _without_selections(event)
    parts = demand_phases(plain)
    total = gaussian_rdp(parts.mu, orders)
    if math.isinf(parts.mu):
        return total
    for step, count in parts.steps:
        total = total + count * step_rdp(step, orders)
    for selection, count in selections:
        if count:
            total = total + count * selected_moments(selection, orders, event_rdp(selection.run, orders))
    return _known(total)


def selected_moments(event: PrivateSelection, orders: Array, rdp: Array) -> Array:
    """Return a bound on the Renyi divergence of a selection at each order above 1, given that of its run there.

    The first and the second formula of `dpcore.accounting.selection`; u runs over `DEFAULT_ORDERS` and 1.
    """
    every = np.array(DEFAULT_ORDERS)
    every_rdp = event_rdp(event.run, every)
    if event.shape is not None:
        g = continuation(event.shape, event.expected_runs)
        second = float(np.min((1.0 - 1.0 / every) * every_rdp - math.log(g) / every, initial=-math.log(g)))
        mean = mean_of(event.shape, g)
        return np.asarray((rdp + (1.0 + event.shape) * second + math.log(mean) / (orders - 1.0)) * (1.0 + 1e-12))
    mean = event.expected_runs
    logs = [log_delta_from_rdp(every, every_rdp, -math.log1p(-1.0 / order)) for order in orders.tolist()]
    inside = (orders - 1.0) * (rdp + mean * np.exp(np.minimum(0.0, logs)))
    return np.asarray(np.logaddexp(-mean, math.log(mean) + inside) / (orders - 1.0) * (1.0 + 1e-12))


def _without_selections(event: Event) -> tuple[Event, list[tuple[PrivateSelection, int]]]:
    """Return the event without its private selections, and these with their counts."""
    parts = list(parts_of(event))
    selections = [(part, count) for part, count in parts if isinstance(part, PrivateSelection)]
    if not selections:
        return event, []
    others = [SelfComposed(part, count) for part, count in parts if not isinstance(part, PrivateSelection)]
    return Composed(tuple(others)), selections


def gaussian_rdp(mu: float, orders: Array) -> Array:
    """Return the Renyi divergence of N(mu, 1) and N(0, 1) at each order."""
    return orders * (mu * mu / 2.0) if mu > 0.0 else np.zeros_like(orders)


def step_rdp(step: Step, orders: Array) -> Array:
    """Return a bound on the Renyi divergence of one sampled step at each order, (m,) float64, 0 or more.

    A mixture whose component is drawn in the open has exp((alpha - 1) D_alpha) at most the weighted sum of the
    components', since it is an f-divergence of the joint distributions; a component that releases nothing has 1.
    """
    if not isinstance(step, PoissonStep):
        if isinstance(step, AllocationStep):
            log_moment = log_moments_allocation(step.batches, step.noise_multiplier, orders)
        else:
            log_moment = log_moments_without_replacement(step.sample_rate, step.noise_multiplier, orders)
        return np.maximum(0.0, log_moment / (orders - 1.0))
    parts = [
        (weight, gaussian_rdp(1.0 / sigma, orders) if q == 1.0 else poisson_rdp(q, sigma, orders))
        for weight, q, sigma in step.components
    ]
    if len(parts) == 1 and parts[0][0] == 1.0:
        return parts[0][1]
    # A moment less 1 moves with weights and rates by at most as many times their error as its order.
    logs = [np.log(weight) + log_expm1((orders - 1.0) * rdp) + orders * step.error for weight, rdp in parts]
    return np.asarray(np.logaddexp(0.0, np.logaddexp.reduce([np.full_like(orders, -np.inf), *logs])) / (orders - 1.0))


def poisson_rdp(sample_rate: float, noise_multiplier: float, orders: Array) -> Array:
    """Return the Renyi divergence of one Poisson-sampled Gaussian step, in both directions, at each order.

    For 0 < sample_rate < 1 and noise_multiplier > 0 (Mironov, Talwar, Zhang 2019, sections 3.2 and 3.3).
    """
    log_moment = np.empty_like(orders)
    whole = orders == np.floor(orders)
    if whole.any():
        integers = tuple(int(order) for order in orders[whole])
        log_moment[whole] = log_moments_integer(sample_rate, noise_multiplier, integers)
    if not whole.all():
        log_moment[~whole] = log_moments_exact(sample_rate, noise_multiplier, orders[~whole])
    return np.maximum(0.0, log_moment / (orders - 1.0))


def log_expm1(x: Array) -> Array:
    """Return log(exp(x) - 1) of x >= 0, without overflow; -inf at 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(x + np.log(-np.expm1(-x)))
