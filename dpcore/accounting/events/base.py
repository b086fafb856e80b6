"""Events: immutable descriptions of what was released. Accountants interpret them; an event computes no epsilon.

Rules for evolution: the meaning of an event never changes once a ledger or a statement may hold one (add a class
instead), and an event carries everything one must know to derive epsilon again. `noise_multiplier` is always the
standard deviation of the noise on a sum over the L2 sensitivity of that sum **under the event's own adjacency**; each
class says which sensitivity that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar, Final

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate


class Adjacency(StrEnum):
    """Which two data sets an epsilon tells apart."""

    ADD_REMOVE = "add-remove"
    """One example is added or removed. A sum of vectors of norm at most C changes by at most C."""
    ZERO_OUT = "zero-out"
    """One example is replaced by one whose vector is zero. The sum changes by at most C; no batch changes its size."""
    REPLACE_ONE = "replace-one"
    """One example is replaced by another. The sum changes by at most 2C."""


def _adjacency(*, adjacency: str) -> Adjacency:
    return Adjacency(validate.choice([kind.value for kind in Adjacency], adjacency=adjacency))


def _name(*, strategy: str) -> str:
    if not str(strategy).strip():
        raise ArgumentError(f"strategy={strategy!r}: must be the name or the digest of the matrix")
    return strategy


_ANY: Final = partial(validate.integer, 0)
_SOME: Final = partial(validate.integer, 1)


@dataclass(frozen=True)
class Event(validate.Checked):
    """Base of every event. A field that several have means the same in all, and is checked by one rule."""

    _kinds: ClassVar[dict[str, type[Event]]] = {}
    rules: ClassVar[validate.Rules] = {
        "sample_rate": validate.fraction,
        "noise_multiplier": validate.non_negative,
        "sensitivity": validate.non_negative,
        **dict.fromkeys(("steps", "count", "epochs"), _ANY),
        **dict.fromkeys(("dataset_size", "batch_size", "max_batch_size", "groups", "batches"), _SOME),
        "strategy": _name,
        "adjacency": _adjacency,
    }

    def __init_subclass__(cls) -> None:
        """Make the class known to `from_dict` by its name."""
        Event._kinds[cls.__name__] = cls

    @property
    def adjacency(self) -> Adjacency | None:
        """The adjacency the event is described under; None when it gives no guarantee under any."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a dict of JSON values: its class name under "event", then its fields."""
        return {"event": type(self).__name__} | {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Event:
        """Return the event that `to_dict` described.

        Raises `ArgumentError` for a class or fields that are unknown or missing.
        """
        try:
            kind = Event._kinds[validate.choice(Event._kinds, event=data["event"])]
        except (KeyError, TypeError) as cause:
            message = f"data={data!r}: must be a mapping with the name of an event under 'event'"
            raise ArgumentTypeError(message) from cause
        known = [item.name for item in fields(kind)]
        for name in data:
            if name != "event":
                validate.choice(known, field=name)
        try:
            arguments = {name: _from_plain(data[name]) for name in known if name in data}
        except RecursionError as cause:
            raise ArgumentError("data: events are nested too deep") from cause
        try:
            return kind(**arguments)
        except TypeError as cause:
            if isinstance(cause, ArgumentTypeError):
                raise
            missing = [name for name in known if name not in data]
            raise ArgumentError(f"data={dict(data)!r}: {kind.__name__} also needs {', '.join(missing)}") from cause


def _plain(value: Any) -> Any:
    """Return a field of an event as JSON values."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.to_dict() if isinstance(value, Event) else value.value if isinstance(value, Adjacency) else value


def _from_plain(value: Any) -> Any:
    """Return what `_plain` described."""
    if isinstance(value, (list, tuple)):
        return tuple([_from_plain(item) for item in value])
    return Event.from_dict(value) if isinstance(value, Mapping) and "event" in value else value


def check_event(**values: Any) -> Event:
    """Return the value if it is an event; raise ArgumentTypeError otherwise."""
    ((name, value),) = values.items()
    if not isinstance(value, Event):
        raise ArgumentTypeError(f"{name}={value!r}: must be an event of dpcore.accounting")
    return value
