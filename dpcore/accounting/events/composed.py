"""Events made of other events, and the one that guarantees nothing."""

from __future__ import annotations

from dataclasses import dataclass

from dpcore.accounting.events.base import Adjacency, Event, check_event
from dpcore.errors import ArgumentError, ArgumentTypeError

_DEEPEST = 100  # events within events; far below what Python's own recursion allows


def _depth(parts: tuple[Event, ...]) -> int:
    """How deep the parts lie within each other; too many levels are refused."""
    depth = 1 + max((getattr(part, "_depth", 0) for part in parts), default=0)
    if depth > _DEEPEST:
        raise ArgumentError(f"events: nested more than {_DEEPEST} deep; put them into one Composed side by side")
    return depth


@dataclass(frozen=True)
class NonPrivate(Event):
    """A release without any guarantee: epsilon is infinity. `reason` is one sentence for the statement."""

    reason: str
    adjacency = None

    def __post_init__(self) -> None:
        if not str(self.reason).strip():
            raise ArgumentError(f"reason={self.reason!r}: must be a sentence that says why the release is not private")


@dataclass(frozen=True)
class Composed(Event):
    """Several events about the same data, fixed beforehand, one after the other.

    Events under add-remove and zero-out compose under zero-out (an example whose vector is zero adds nothing to any
    sum, so a bound under add-remove also bounds its replacement by such an example). Replace-one never mixes with
    either.

    Parameters
    ----------
    events : tuple of Event
        The parts, possibly none (then nothing was released and epsilon is 0).
    """

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))
        for event in self.events:
            if not isinstance(event, Event):
                raise ArgumentTypeError(f"events: {event!r} must be an event of dpcore.accounting")
        object.__setattr__(self, "_depth", _depth(self.events))
        kinds = {event.adjacency for event in self.events} - {None}
        if Adjacency.REPLACE_ONE in kinds and len(kinds) > 1:
            raise ArgumentError("events: replace-one cannot be composed with another adjacency in one event")

    @property
    def adjacency(self) -> Adjacency | None:
        """The one adjacency all parts share, or zero-out for a mixture of add-remove and zero-out."""
        kinds = {event.adjacency for event in self.events} - {None}
        return Adjacency.ZERO_OUT if len(kinds) > 1 else next(iter(kinds), None)


@dataclass(frozen=True)
class SelfComposed(Event):
    """One event, `count` times over, about the same data and fixed beforehand.

    Parameters
    ----------
    repeated : Event
        What is repeated.
    count : int
        How often, 0 or more.
    """

    repeated: Event
    count: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_event(repeated=self.repeated)
        object.__setattr__(self, "_depth", _depth((self.repeated,)))

    @property
    def adjacency(self) -> Adjacency | None:
        """That of the repeated event."""
        return self.repeated.adjacency
