"""Zero-concentrated differential privacy and the classic Gaussian calibrations: looser than the rest, for comparison.

A Gaussian mechanism with parameter mu is rho-zCDP with rho = mu^2/2 (rho adds up), and rho-zCDP gives, for every delta,

    epsilon = rho + 2 sqrt(rho log(1/delta)),

hence delta = exp(-(epsilon - rho)^2 / (4 rho)) for epsilon >= rho.

References
----------
Bun, Steinke, "Concentrated Differential Privacy: Simplifications, Extensions, and Lower Bounds", 2016, Propositions 1.3
and 1.6.
Dwork, Roth, "The Algorithmic Foundations of Differential Privacy", 2014, Theorem A.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpcore.accounting.events import Event
from dpcore.accounting.gaussian import GaussianAccountant, event_mu
from dpcore.errors import ArgumentError
from dpcore.spec import validate


@dataclass(frozen=True)
class ZcdpAccountant(GaussianAccountant):
    """zCDP of events that are Gaussian mechanisms as a whole, with the classic conversion; for comparison only.

    The "gaussian" accountant covers the same events exactly.
    """

    name = "zcdp"
    floor = "zCDP has no floor of its own"

    def epsilon(self, event: Event, delta: float) -> float:
        """Return rho + 2 sqrt(rho log(1/delta))."""
        return zcdp_epsilon(_rho(event), delta)

    def delta(self, event: Event, epsilon: float) -> float:
        """Return the inverse of `epsilon`, at most 1."""
        rho = _rho(event)
        if rho == 0.0:
            return 0.0
        if epsilon <= rho:
            return 1.0
        return math.exp(-(epsilon - rho) * ((epsilon - rho) / (4.0 * rho)))


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return epsilon at 0 < delta < 1 of rho-zCDP, rho >= 0 or infinity."""
    return rho + 2.0 * math.sqrt(rho * -math.log(delta))


def _rho(event: Event) -> float:
    mu = event_mu(event)
    return mu * mu / 2.0


def classic_noise_multiplier(epsilon: float, delta: float) -> float:
    """Return sqrt(2 log(1.25/delta)) / epsilon, the textbook noise multiplier of one Gaussian sum, for comparison.

    `analytic_noise_multiplier` needs less noise and holds at every epsilon.

    Parameters
    ----------
    epsilon : float
        0 < epsilon < 1: the proof needs it, and the formula gives too little noise at large epsilons.
    delta : float
        0 < delta < 1.

    Raises
    ------
    ArgumentError
        If epsilon is 1 or more.
    """
    epsilon = validate.positive(epsilon=epsilon)
    delta = validate.open_unit(delta=delta)
    if epsilon >= 1.0:
        raise ArgumentError(
            f"epsilon={epsilon!r}: must be below 1 for the classic formula, which is wrong at large epsilons; "
            "use analytic_noise_multiplier"
        )
    return math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon


def closed_form_noise_multiplier(epsilon: float, delta: float) -> float:
    """Return sqrt(2 log(1/(2 delta))) / epsilon + 1 / sqrt(2 epsilon), which is enough noise at every epsilon.

    `analytic_noise_multiplier` needs less. For b > 0 let mu solve epsilon / mu - mu / 2 = b: then delta(epsilon) <=
    Phi(-b) <= exp(-b^2/2) / 2, which is delta for b = sqrt(2 log(1/(2 delta))); and 1/mu = (b + sqrt(b^2 + 2 epsilon))
    / (2 epsilon) is at most b / epsilon + 1 / sqrt(2 epsilon).

    Parameters
    ----------
    epsilon : float
        Greater than 0.
    delta : float
        0 < delta <= 0.05.

    Raises
    ------
    ArgumentError
        If delta is above 0.05.
    """
    epsilon = validate.positive(epsilon=epsilon)
    delta = validate.open_unit(delta=delta)
    if delta > 0.05:
        raise ArgumentError(f"delta={delta!r}: must be at most 0.05 for the closed form; use analytic_noise_multiplier")
    return math.sqrt(2.0 * math.log(0.5 / delta)) / epsilon + 1.0 / math.sqrt(2.0 * epsilon)
