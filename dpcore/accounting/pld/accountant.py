"""The accountant built on certified privacy-loss distributions."""

from __future__ import annotations

from dataclasses import dataclass

from dpcore.accounting.events import Event
from dpcore.accounting.phases import phases
from dpcore.accounting.pld.intervals import delta_interval, epsilon_interval


@dataclass(frozen=True)
class PldAccountant:
    """Privacy-loss distributions: the upper ends of `epsilon_interval` and `delta_interval`.

    Covers every event that comes down to a Gaussian mechanism and sampled Gaussian steps (`dpcore.accounting.phases`).
    """

    name = "pld"
    floor = "the PLD accountant rounds epsilon up, as a rule by at most max(1e-3 epsilon, 1e-4)"

    def supports(self, event: Event) -> bool:
        """Whether every part of the event is known."""
        return phases(event) is not None

    def epsilon(self, event: Event, delta: float) -> float:
        """Return the upper end at the default tolerance."""
        return epsilon_interval(event, delta).upper

    def delta(self, event: Event, epsilon: float) -> float:
        """Return the upper end at the default tolerance, at most 1."""
        return min(1.0, delta_interval(event, epsilon).upper)
