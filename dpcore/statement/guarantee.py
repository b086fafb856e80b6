"""The guarantee of events: epsilon by accountant, its certified interval, and bounds on an attacker."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from dpcore import accounting
from dpcore.accounting import Event
from dpcore.accounting.pld import trade_off

FALSE_POSITIVE_RATES: Final = (1e-3, 1e-2)

ROUTES: Final = {
    "rdp": (
        "Renyi divergence of every step at many orders above 1, added up over the steps; from an order a and its sum R "
        "follows epsilon = R + ln(1 - 1/a) - (ln(delta) + ln(a))/(a - 1) (Canonne, Kamath, Steinke 2020, Proposition "
        "12); the smallest over the orders is stated."
    ),
    "pld": (
        "Privacy loss distribution of every step on a grid, rounded up for the upper end and down for the lower one, "
        "composed over the steps by convolution (FFT) with its errors added, for both directions of the adjacency; "
        "epsilon solves delta = E[max(0, 1 - exp(epsilon - loss))]."
    ),
    "gaussian": (
        "Exact: all steps are one Gaussian mechanism with mu = sqrt(sum of (sensitivity/noise)^2), and delta = "
        "Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu) (Balle, Wang 2018, Theorem 8)."
    ),
}
"""How each accountant comes from the event to epsilon, one sentence each."""


def guarantee(event: Event, planned: Event, delta: float) -> dict[str, Any]:
    """Return the fields of a `dpcore.statement.Statement` that follow from its events."""
    spent = accounting.epsilons(event, delta)
    return {
        "event": event.to_dict(),
        "event_planned": planned.to_dict(),
        "epsilon": spent,
        "epsilon_planned": accounting.epsilons(planned, delta),
        "epsilon_interval": epsilon_interval(event, delta),
        "attacker": attacker(event),
        "derivation": {name: ROUTES[name] for name in spent},
    }


def epsilon_interval(event: Event, delta: float) -> dict[str, float]:
    """Return the ends between which the smallest epsilon certainly lies; empty if none is known."""
    if not _has_losses(event):
        return {}
    found = accounting.epsilon_interval(event, delta)
    return {"lower": float(found.lower), "upper": float(found.upper)}


def attacker(event: Event) -> dict[str, Any]:
    """Return upper bounds on how well an attacker can distinguish two neighboring data sets.

    Empty if no privacy loss distribution is known.
    """
    if not _has_losses(event):
        return {}
    return {**_attack(event), "true_positive_rate": dict(_attack(event)["true_positive_rate"])}


@lru_cache(maxsize=64)
def _attack(event: Event) -> dict[str, Any]:
    curve = trade_off(event, FALSE_POSITIVE_RATES)
    rates = {f"{rate:g}": float(upper) for rate, upper in zip(FALSE_POSITIVE_RATES, curve.upper, strict=True)}
    return {"true_positive_rate": rates, "advantage": float(curve.advantage.upper)}


def _has_losses(event: Event) -> bool:
    return "pld" in accounting.accountants_for(event)
