"""What a run's rows release, as its plan says it."""

from __future__ import annotations

from collections.abc import Callable

from dpcore.accounting import Event
from dpcore.errors import ArgumentTypeError

# (steps, abandoned, forks): what the first `steps` rows of a branch release, and `abandoned` rows of the branches that
# `forks` forks left behind.
EventAfter = Callable[[int, int, int], Event]


def event_of(event_after: EventAfter, steps: int, abandoned: int, forks: int = 0) -> Event:
    """Return the event of so many steps and abandoned rows, checked to be one."""
    event = event_after(steps, abandoned, forks)
    if not isinstance(event, Event):
        raise ArgumentTypeError(
            f"event_after({steps}, {abandoned}, {forks})={event!r}: must be an event of dpcore.accounting"
        )
    return event
