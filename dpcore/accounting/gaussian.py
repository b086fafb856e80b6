"""The exact privacy of Gaussian mechanisms (Gaussian differential privacy).

A mechanism that adds N(0, s^2 I) to a vector which one example moves by at most D in L2 is as private as telling N(0,
1) from N(mu, 1) with mu = D/s, and that is (epsilon, delta(epsilon))-private exactly for

    delta(eps) = Phi(a) - e^eps Phi(b),    a = mu/2 - eps/mu,  b = -mu/2 - eps/mu.

Composition: mu^2 adds up, also when later sums depend on earlier releases.

Numerically, b^2/2 = a^2/2 + eps, hence e^eps Phi(b) = exp(-a^2/2) erfcx(-b/sqrt 2)/2: nothing overflows, and for a <=
1 the difference is taken between two scaled tails of the same size instead of two tiny numbers. They lie mu/sqrt 2
apart; where that is little, their difference is the integral of -erfcx'(x) = 2/sqrt(pi) - 2 x erfcx(x) > 0 by Gauss's
rule, which loses no digit however small mu is.

References
----------
Balle, Wang, "Improving the Gaussian Mechanism for Differential Privacy", 2018, Theorem 8 and Algorithm 1.
Dong, Roth, Su, "Gaussian Differential Privacy", 2022 (delta of a Gaussian; Corollary 3.3 for composition).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dpcore.accounting.events import Event
from dpcore.accounting.phases import demand_phases, phases
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.spec import special, validate

_NARROW = 0.01
_GAUSS = ((0.5 - math.sqrt(0.15), 5 / 18), (0.5, 8 / 18), (0.5 + math.sqrt(0.15), 5 / 18))  # exact to degree 5


MOST = 1e13
"""Of mu: beyond it nothing is certified, since an error of its last digit moves the tails by a thousandth."""


def log_delta(mu: float, epsilon: float) -> float:
    """Return log(delta) of the Gaussian mechanism with parameter mu >= 0 at epsilon >= 0; -inf if delta is 0."""
    if mu == 0.0:
        return -math.inf
    if mu > MOST:
        return 0.0
    shift, width = epsilon / mu, mu / math.sqrt(2.0)
    a = 0.5 * mu - shift
    x = -a / math.sqrt(2.0)
    if a > 1.0:
        return math.log(float(special.ndtr(a)) - 0.5 * math.exp(-0.5 * a * a) * float(special.erfcx(x + width)))
    if width > _NARROW:
        gap = float(special.erfcx(x) - special.erfcx(x + width))
    else:
        points = ((x + node * width, weight) for node, weight in _GAUSS)
        gap = width * sum(w * (2.0 / math.sqrt(math.pi) - 2.0 * t * float(special.erfcx(t))) for t, w in points)
    return math.log(0.5 * gap) - 0.5 * a * a if gap > 0.0 else -math.inf


def rounding(mu: float) -> float:
    """Return a bound on the rounding error of `log_delta`.

    The arguments of its tails are rounded in proportion to mu. No error is proven of the functions used. Against 60
    digits, half of this bound was the most that was measured, for mu from 1e-20 to 1e13.
    """
    return 4e-11 + 1.6e-14 * mu if mu <= MOST else math.inf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon >= 0 with delta(epsilon) <= delta, rounded up; infinity for mu above `MOST`."""
    if mu > MOST:
        return math.inf
    target = math.log(delta) - rounding(mu)
    if log_delta(mu, 0.0) <= target:
        return 0.0
    # Concentrated privacy with rho = mu^2/2 gives delta(rho + 2 sqrt(rho log(1/delta))) <= delta: a certain upper end.
    top = 0.5 * mu * mu + mu * math.sqrt(-2.0 * target)
    if math.isinf(top):
        return math.inf
    return _least(lambda epsilon: log_delta(mu, epsilon) - target, 0.0, top)


def analytic_noise_multiplier(epsilon: float, delta: float, count: int = 1) -> float:
    """Return the smallest noise multiplier that makes `count` touched sums (epsilon, delta)-private, rounded up.

    Parameters
    ----------
    epsilon : float
        Greater than 0, at most 1e17 (the classic sqrt(2 log(1.25/delta))/epsilon holds only below 1).
    delta : float
        0 < delta < 1.
    count : int
        Number of sums one example takes part in.

    Returns
    -------
    float
        Standard deviation of the noise on a sum over the L2 sensitivity of that sum.

    References
    ----------
    Balle and Wang 2018, Algorithm 1 (solved here by bracketing instead of their reparametrization).
    """
    if (epsilon := validate.positive(epsilon=epsilon)) > 1e17:
        raise ArgumentError(f"epsilon={epsilon!r}: must be at most 1e17, beyond which too little noise is left")
    target = math.log(validate.open_unit(delta=delta))
    count = validate.integer(count=count, minimum=1)
    # With u = sqrt(2 log(1/delta)), mu = sqrt(u^2 + 2 eps) - u has zCDP bound exactly eps, so it is private enough.
    spread = math.sqrt(-2.0 * target)
    low = 2.0 * epsilon / (math.sqrt(spread * spread + 2.0 * epsilon) + spread)
    high = 2.0 * low
    while log_delta(high, epsilon) <= target:
        high *= 2.0
    sigma = _least(lambda s: log_delta(1.0 / s, epsilon) + rounding(1.0 / s) - target, 1.0 / high, 1.0 / low)
    return sigma * math.sqrt(count)


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the root of a decreasing function between low and high, on the side with values not above 0."""
    from scipy.optimize import brentq  # most of dpcore's import time, were it at the top

    if function(high) > 0.0:  # only by rounding, at the very end of the bracket
        high *= 1.0 + 1e-9
    floor = -1e300  # brentq takes no infinities
    root = float(brentq(lambda x: max(function(x), floor), low, high, xtol=1e-300, rtol=8.9e-16))
    step = 1e-15
    while function(root) > 0.0:
        root, step = root * (1.0 + step), 2.0 * step
    return root


@dataclass(frozen=True)
class GaussianAccountant:
    """Exact (epsilon, delta), rounded up, of events that are Gaussian mechanisms as a whole.

    Covers every event that samples nothing in secret (`dpcore.accounting.phases`): Gaussian and matrix mechanisms,
    sampling at rate 1 (everyone takes part in every step), `NonPrivate`, and compositions of these.
    """

    name = "gaussian"
    floor = "the exact Gaussian accountant has no floor of its own"

    def supports(self, event: Event) -> bool:
        """Whether the event is a Gaussian mechanism as a whole."""
        parts = phases(event)
        return parts is not None and not parts.steps

    def epsilon(self, event: Event, delta: float) -> float:
        """Return the smallest epsilon at delta."""
        return gaussian_epsilon(event_mu(event), delta)

    def delta(self, event: Event, epsilon: float) -> float:
        """Return the smallest delta at epsilon."""
        mu = event_mu(event)
        return min(1.0, math.exp(log_delta(mu, epsilon) + rounding(mu)))


def event_mu(event: Event) -> float:
    """Return mu of an event that is a Gaussian mechanism: infinity without noise, 0 without a release.

    Raises `PrivacyError` if it is not one.
    """
    parts = demand_phases(event)
    if parts.steps:
        raise PrivacyError(
            f"event={type(event).__name__}: is not a Gaussian mechanism as a whole: it samples in secret"
        )
    return parts.mu
