"""The event of a run's rows, as its plan describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dpcore.accounting import Event
from dpcore.accounting.branches import Rows
from dpcore.errors import ArgumentTypeError

# (steps, abandoned): what the first `steps` rows of a branch release, and the rows of the branches that were left.
EventAfter = Callable[[int, Sequence[Rows]], Event]


def event_of(event_after: EventAfter, steps: int, abandoned: Sequence[Rows] = ()) -> Event:
    """Return the event of so many steps and abandoned rows, checked to be one."""
    event = event_after(steps, abandoned)
    if not isinstance(event, Event):
        raise ArgumentTypeError(f"event_after({steps}, {abandoned})={event!r}: must be an event of dpcore.accounting")
    return event
