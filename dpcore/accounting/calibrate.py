"""From a target (epsilon, delta) to the noise multiplier that meets it."""

from __future__ import annotations

import math
from collections.abc import Callable

from dpcore import validate
from dpcore.accounting import base
from dpcore.accounting.events import Event
from dpcore.errors import ArgumentError, ArgumentTypeError

LARGEST = 1e7
SMALLEST = 1e-4
TOLERANCE = 1e-6


def calibrate_noise_multiplier(
    target_epsilon: float,
    target_delta: float,
    make_event: Callable[[float], Event],
    accountant: str | base.Accountant = "rdp",
) -> float:
    """Return the noise multiplier at which an event just meets (target_epsilon, target_delta).

    Parameters
    ----------
    target_epsilon : float
        Greater than 0.
    target_delta : float
        0 < target_delta < 1.
    make_event : callable
        noise_multiplier -> event, with all other settings fixed; epsilon must not grow with the multiplier.
    accountant : str or Accountant
        Which accountant's epsilon is meant.

    Returns
    -------
    float
        A multiplier whose epsilon is at most `target_epsilon`, always, and at least (1 - 1e-6) `target_epsilon`, unless
        the accountant's epsilon jumps there: RDP goes to 0 at once where the divergence falls below about delta^2. Then
        it is the least multiplier beyond the jump.

    Raises
    ------
    ArgumentError
        If the target is out of reach of every multiplier between 1e-4 and 1e7.
    PrivacyError
        If the accountant does not cover the event.

    Examples
    --------
    >>> from dpcore.accounting import PoissonSampledGaussian, calibrate_noise_multiplier
    >>> sigma = calibrate_noise_multiplier(3.0, 1e-5, lambda s: PoissonSampledGaussian(0.01, s, 1000))
    >>> round(sigma, 3)
    0.865
    """
    target = validate.positive(target_epsilon=target_epsilon)
    delta = validate.open_unit(target_delta=target_delta)
    if not callable(make_event):
        raise ArgumentTypeError(f"make_event={make_event!r}: must be a function from a noise multiplier to an event")
    chosen = base.find(accountant)
    known: dict[float, float] = {}

    def epsilon(multiplier: float) -> float:
        if multiplier not in known:
            event = make_event(multiplier)
            base.demand_support(chosen, event)
            known[multiplier] = chosen.epsilon(event, delta)
        return known[multiplier]

    low, high = _bracket(epsilon, target, chosen)
    aim = target * (1.0 - 0.5 * TOLERANCE)

    def excess(log_multiplier: float) -> float:
        value = epsilon(math.exp(log_multiplier))
        return max(-50.0, min(50.0, math.log(value / aim))) if value > 0.0 else -50.0

    from scipy.optimize import brentq  # most of dpcore's import time, were it at the top

    if excess(math.log(low)) > 0.0 > excess(math.log(high)):
        brentq(excess, math.log(low), math.log(high), xtol=1e-12, rtol=1e-14)
    too_little = max(multiplier for multiplier, value in known.items() if value > target)
    return min(multiplier for multiplier, value in known.items() if value <= target and multiplier > too_little)


def _bracket(epsilon: Callable[[float], float], target: float, chosen: base.Accountant) -> tuple[float, float]:
    """Return multipliers low < high with epsilon(low) > target >= epsilon(high)."""
    low = high = 1.0
    while epsilon(high) > target:
        low = high
        if high >= LARGEST:
            raise ArgumentError(
                f"target_epsilon={target!r}: even noise_multiplier={high:g} gives epsilon={epsilon(high):.6g}, and "
                f"more noise is not tried ({chosen.floor}); raise target_epsilon or target_delta, or take fewer steps"
            )
        high = min(4.0 * high, LARGEST)
    while epsilon(low) <= target:
        high = low
        if low <= SMALLEST:
            raise ArgumentError(
                f"target_epsilon={target!r}: even noise_multiplier={low:g} gives epsilon={epsilon(low):.6g}, and less "
                "noise is not tried; lower target_epsilon, or check that make_event uses the multiplier it is given"
            )
        low = max(low / 4.0, SMALLEST)
    return low, high
