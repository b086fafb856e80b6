"""A guess of epsilon in microseconds, to begin a search at. It is no bound.

By a central limit theorem, many sampled steps of small privacy loss are nearly one Gaussian mechanism with mu^2 the sum
of the steps' chi-squared divergences, q^2 (exp(1/s^2) - 1).

References
----------
Bu, Dong, Long, Su, "Deep Learning with Gaussian Differential Privacy", 2020 (the central limit theorem under
Poisson sampling).
"""

from __future__ import annotations

import math

from dpcore.accounting.events import Event
from dpcore.accounting.gaussian import gaussian_epsilon
from dpcore.accounting.phases import AllocationStep, Step, phases


def estimated_epsilon(event: Event, delta: float) -> float:
    """Return about how large epsilon is at delta; infinity where the event is of a kind unknown here."""
    found = phases(event)
    if found is None:
        return math.inf
    square = found.mu * found.mu + math.fsum(count * _divergence(step) for step, count in found.steps)
    return gaussian_epsilon(math.sqrt(square), delta)


def _divergence(step: Step) -> float:
    if isinstance(step, AllocationStep):
        return math.expm1(min(step.noise_multiplier**-2, 300.0)) / step.batches
    terms = (weight * q * q * math.expm1(min(1.0 / (sigma * sigma), 300.0)) for weight, q, sigma in step.components)
    return math.fsum(terms)
