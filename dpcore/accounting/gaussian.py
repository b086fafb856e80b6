"""The exact privacy of Gaussian mechanisms (Gaussian differential privacy).

A mechanism that adds N(0, s^2 I) to a vector which one example moves by at most D in L2 is as private as telling N(0,
1) from N(mu, 1) with mu = D/s, and that is (epsilon, delta(epsilon))-private exactly for

    delta(eps) = Phi(a) - e^eps Phi(b),    a = mu/2 - eps/mu,  b = -mu/2 - eps/mu.

Composition: mu^2 adds up, also when later sums depend on earlier releases.

Numerically, b^2/2 = a^2/2 + eps, hence e^eps Phi(b) = exp(-a^2/2) erfcx(-b/sqrt 2)/2: nothing overflows, and for a <=
0 the difference is taken between two scaled tails of the same size instead of two tiny numbers.

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
from dpcore.errors import PrivacyError
from dpcore.spec import special, validate


def log_delta(mu: float, epsilon: float) -> float:
    """Return log(delta) of the Gaussian mechanism with parameter mu >= 0 at epsilon >= 0; -inf if delta is 0."""
    if mu == 0.0:
        return -math.inf
    if math.isinf(mu):
        return 0.0
    shift = epsilon / mu
    a, b = 0.5 * mu - shift, -0.5 * mu - shift
    tail = float(special.erfcx(-b / math.sqrt(2.0)))
    if a > 0.0:
        value = float(special.ndtr(a)) - 0.5 * math.exp(-0.5 * a * a) * tail
        return math.log(value) if value > 0.0 else -math.inf
    gap = 0.5 * (float(special.erfcx(-a / math.sqrt(2.0))) - tail)
    return math.log(gap) - 0.5 * a * a if gap > 0.0 else -math.inf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon >= 0 with delta(epsilon) <= delta, rounded up; `mu` may be 0 or infinity."""
    if math.isinf(mu):
        return math.inf
    target = math.log(delta)
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
        Greater than 0; any size (the classic sqrt(2 log(1.25/delta))/epsilon holds only below 1).
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
    epsilon = validate.positive(epsilon=epsilon)
    target = math.log(validate.open_unit(delta=delta))
    count = validate.integer(count=count, minimum=1)
    # With u = sqrt(2 log(1/delta)), mu = sqrt(u^2 + 2 eps) - u has zCDP bound exactly eps, so it is private enough.
    spread = math.sqrt(-2.0 * target)
    low = 2.0 * epsilon / (math.sqrt(spread * spread + 2.0 * epsilon) + spread)
    high = 2.0 * low
    while log_delta(high, epsilon) <= target:
        high *= 2.0
    sigma = _least(lambda sigma: log_delta(1.0 / sigma, epsilon) - target, 1.0 / high, 1.0 / low)
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
    """Exact (epsilon, delta) of events that are Gaussian mechanisms as a whole.

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
        return min(1.0, math.exp(log_delta(event_mu(event), epsilon)))


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
