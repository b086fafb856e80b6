"""Events: immutable descriptions of what was released. Accountants interpret them; an event computes no epsilon.

Rules for evolution: the meaning of an event never changes once a ledger or a statement may hold one (add a class
instead), and an event carries everything one must know to derive epsilon again. `noise_multiplier` is always the
standard deviation of the noise on a sum over the L2 sensitivity of that sum **under the event's own adjacency**; each
class says which sensitivity that is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from dpcore import validate
from dpcore.errors import ArgumentError, ArgumentTypeError


class Adjacency(StrEnum):
    """Which two data sets an epsilon tells apart."""

    ADD_REMOVE = "add-remove"
    """One example is added or removed. A sum of vectors of norm at most C changes by at most C."""
    ZERO_OUT = "zero-out"
    """One example is replaced by one whose vector is zero. The sum changes by at most C; no batch changes its size."""
    REPLACE_ONE = "replace-one"
    """One example is replaced by another. The sum changes by at most 2C."""


@dataclass(frozen=True)
class Event:
    """Base of every event."""

    @property
    def adjacency(self) -> Adjacency | None:
        """The adjacency the event is described under; None when it gives no guarantee under any."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a dict of JSON values: its class name under "event", then its fields."""
        result: dict[str, Any] = {"event": type(self).__name__}
        for item in fields(self):
            value = getattr(self, item.name)
            result[item.name] = value.value if isinstance(value, Adjacency) else value
        return result

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Event:
        """Return the event that `to_dict` described.

        Raises
        ------
        ArgumentError
            If the class name is unknown, or a field is missing or unknown.
        """
        try:
            kind = _EVENTS[validate.choice(_EVENTS, event=data["event"])]
        except (KeyError, TypeError) as cause:
            message = f"data={data!r}: must be a mapping with the name of an event under 'event'"
            raise ArgumentTypeError(message) from cause
        known = [item.name for item in fields(kind)]
        for name in data:
            if name != "event":
                validate.choice(known, field=name)
        arguments = {name: data[name] for name in known if name in data}
        if kind is Composed:
            arguments["events"] = tuple(Event.from_dict(item) for item in arguments.get("events", ()))
        try:
            return kind(**arguments)
        except TypeError as cause:
            if isinstance(cause, ArgumentTypeError):
                raise
            missing = [name for name in known if name not in data]
            raise ArgumentError(f"data={dict(data)!r}: {kind.__name__} also needs {', '.join(missing)}") from cause


@dataclass(frozen=True)
class Gaussian(Event):
    """Gaussian noise on sums of which one example touches at most `count`; nothing is sampled in secret.

    The joint release is one Gaussian mechanism with mu = sqrt(count) / noise_multiplier: the `count` sums that an
    example touches are one vector that moves by at most sqrt(count) sensitivities. Later sums may depend on earlier
    releases.

    Sensitivity assumed: that of **one** sum under `adjacency`; C for add-remove and zero-out, 2C for replace-one,
    where C bounds the norm of an example's vector.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise on a sum over the sensitivity of that sum; 0 means epsilon = infinity.
    count : int
        Number of sums one example takes part in, the largest over all examples.
    adjacency : Adjacency
        What the sensitivity refers to. A fixed order of batches is `zero-out`: removing an example would move the
        others.
    """

    noise_multiplier: float
    count: int = 1
    adjacency: Adjacency = Adjacency.ADD_REMOVE

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", validate.non_negative(noise_multiplier=self.noise_multiplier))
        object.__setattr__(self, "count", validate.integer(count=self.count, minimum=0))
        object.__setattr__(
            self, "adjacency", Adjacency(validate.choice([kind.value for kind in Adjacency], adjacency=self.adjacency))
        )


@dataclass(frozen=True)
class MatrixGaussian(Event):
    """The whole run of a matrix mechanism: `steps` sums whose noise is correlated by a fixed matrix C.

    To release S + C^{-1} Z, with S the sums and Z independent Gaussian noise, is to release C S + Z: one Gaussian
    mechanism with mu = sensitivity / noise_multiplier, also when later sums depend on earlier releases (C is
    lower-triangular). Nothing is sampled in secret. A run that stops early is the event of its prefix: fewer steps, and
    the sensitivity of the leading block of C.

    Sensitivity assumed: one example moves **one** sum by at most a unit, which is the clip norm under zero-out and
    add-remove and twice that under replace-one; `sensitivity` says by how many units it then moves C S as a whole, over
    all the steps at which it takes part, which were fixed before the run. `noise_multiplier` is in the same unit.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of a coordinate of Z in that unit; 0 means epsilon = infinity.
    sensitivity : float
        Largest L2 norm of the change of C S in that unit, 0 or more: `dpcore.strategies.sensitivity`.
    steps : int
        Number of sums, 0 or more.
    strategy : str
        Name or digest of C.
    adjacency : Adjacency
        What `sensitivity` and `noise_multiplier` refer to.

    References
    ----------
    Denisov, McMahan, Rush, Smith, Thakurta, "Improved Differential Privacy for SGD via Optimal Private Linear Operators
    on Adaptive Streams", 2022, Theorem 2.1.
    """

    noise_multiplier: float
    sensitivity: float
    steps: int
    strategy: str
    adjacency: Adjacency = Adjacency.ZERO_OUT

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", validate.non_negative(noise_multiplier=self.noise_multiplier))
        object.__setattr__(self, "sensitivity", validate.non_negative(sensitivity=self.sensitivity))
        object.__setattr__(self, "steps", validate.integer(steps=self.steps, minimum=0))
        if not str(self.strategy).strip():
            raise ArgumentError(f"strategy={self.strategy!r}: must be the name or the digest of the matrix")
        object.__setattr__(
            self, "adjacency", Adjacency(validate.choice([kind.value for kind in Adjacency], adjacency=self.adjacency))
        )

    @property
    def mu(self) -> float:
        """Return mu of the one Gaussian mechanism: 0 where nothing was moved, infinity without noise."""
        if self.steps == 0 or self.sensitivity == 0.0:
            return 0.0
        return self.sensitivity / self.noise_multiplier if self.noise_multiplier > 0.0 else math.inf


@dataclass(frozen=True)
class PoissonSampledGaussian(Event):
    """`steps` sums, each over a fresh secret Poisson sample, each with independent Gaussian noise.

    The adjacency is add-remove.

    Sensitivity assumed: C, the bound on the norm of one example's vector. Each example enters a step with probability
    exactly `sample_rate`, independently of all others and of all other steps; a full batch is never cut off.

    Parameters
    ----------
    sample_rate : float
        Probability that an example enters a step, 0 < sample_rate <= 1.
    noise_multiplier : float
        Standard deviation of the noise on the sum over C; 0 means epsilon = infinity.
    steps : int
        Number of steps, 0 or more.
    """

    sample_rate: float
    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_rate", validate.fraction(sample_rate=self.sample_rate))
        object.__setattr__(self, "noise_multiplier", validate.non_negative(noise_multiplier=self.noise_multiplier))
        object.__setattr__(self, "steps", validate.integer(steps=self.steps, minimum=0))

    @property
    def adjacency(self) -> Adjacency:
        """Add-remove."""
        return Adjacency.ADD_REMOVE


@dataclass(frozen=True)
class FixedSizeSampledGaussian(Event):
    """`steps` sums, each over a fresh secret uniform subset of exactly `batch_size` examples. Replace-one adjacency.

    Sensitivity assumed: 2C (one example's vector is exchanged for another's), so `noise_multiplier` is the standard
    deviation of the noise on the sum over 2C, half of the multiplier relative to the clip norm C.

    Parameters
    ----------
    dataset_size, batch_size : int
        Number of examples, and how many of them each step draws without replacement.
    noise_multiplier : float
        Standard deviation of the noise on the sum over 2C; 0 means epsilon = infinity.
    steps : int
        Number of steps, 0 or more.
    """

    dataset_size: int
    batch_size: int
    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset_size", validate.integer(dataset_size=self.dataset_size, minimum=1))
        object.__setattr__(self, "batch_size", validate.integer(batch_size=self.batch_size, minimum=1))
        if self.batch_size > self.dataset_size:
            raise ArgumentError(f"batch_size={self.batch_size!r}: must be at most dataset_size={self.dataset_size}")
        object.__setattr__(self, "noise_multiplier", validate.non_negative(noise_multiplier=self.noise_multiplier))
        object.__setattr__(self, "steps", validate.integer(steps=self.steps, minimum=0))

    @property
    def adjacency(self) -> Adjacency:
        """Replace-one."""
        return Adjacency.REPLACE_ONE


@dataclass(frozen=True)
class NonPrivate(Event):
    """A release without any guarantee: epsilon is infinity. `reason` is one sentence for the statement."""

    reason: str

    def __post_init__(self) -> None:
        if not str(self.reason).strip():
            raise ArgumentError(f"reason={self.reason!r}: must be a sentence that says why the release is not private")

    @property
    def adjacency(self) -> None:
        """None: there is no guarantee under any adjacency."""
        return


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
        kinds = {event.adjacency for event in self.events} - {None}
        if Adjacency.REPLACE_ONE in kinds and len(kinds) > 1:
            raise ArgumentError("events: replace-one cannot be composed with another adjacency in one event")

    @property
    def adjacency(self) -> Adjacency | None:
        """The one adjacency all parts share, or zero-out for a mixture of add-remove and zero-out."""
        kinds = {event.adjacency for event in self.events} - {None}
        return Adjacency.ZERO_OUT if len(kinds) > 1 else next(iter(kinds), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a dict of JSON values, its parts as a list under "events"."""
        return {"event": "Composed", "events": [event.to_dict() for event in self.events]}


_EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (Gaussian, MatrixGaussian, PoissonSampledGaussian, FixedSizeSampledGaussian, NonPrivate, Composed)
}
