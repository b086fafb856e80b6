"""Events: immutable descriptions of releases. Accountants interpret them; an event computes no epsilon.

Rules for evolution: the meaning of an event never changes once a ledger or a statement may contain one (add a class
instead), and an event has everything that is needed to derive epsilon again. `noise_multiplier` is always the
standard deviation of the noise on a sum over the L2 sensitivity of that sum **under the event's own adjacency**; each
class states that sensitivity. It is 0, or from 1e-9 to 1e9: the accountants are right in that range.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar, Final

from dpcore.accounting.run_law import continuation
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate


class Adjacency(StrEnum):
    """The relation between the two data sets of an epsilon."""

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

    _kinds: ClassVar[dict[str, type["Event"]]] = {}
    rules: ClassVar[validate.Rules] = {
        "sample_rate": validate.fraction,
        "noise_multiplier": validate.noise,
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
    def from_dict(data: Mapping[str, Any]) -> "Event":
        """Return the event that `to_dict` described; refuse a class or fields that are unknown or missing."""
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
    """Return the inverse of `_plain`."""
    if isinstance(value, (list, tuple)):
        return tuple([_from_plain(item) for item in value])
    return Event.from_dict(value) if isinstance(value, Mapping) and "event" in value else value


def check_event(**values: Any) -> Event:
    """Return the value if it is an event; raise ArgumentTypeError otherwise."""
    ((name, value),) = values.items()
    if not isinstance(value, Event):
        raise ArgumentTypeError(f"{name}={value!r}: must be an event of dpcore.accounting")
    return value


def _relative_noise(noise_multiplier: float, sensitivity: float) -> None:
    """Refuse a noise multiplier that is out of range as a multiple of the sensitivity of the whole run."""
    try:
        validate.noise(noise_multiplier=noise_multiplier / sensitivity)
    except ArgumentError as cause:
        raise ArgumentError(f"sensitivity={sensitivity!r}: divides the noise multiplier, and {cause}") from None


# Events of Gaussian noise without secret sampling.


@dataclass(frozen=True)
class Gaussian(Event):
    """Gaussian noise on sums; one example touches at most `count` of them, and nothing is sampled in secret.

    The joint release is one Gaussian mechanism with mu = sqrt(count) / noise_multiplier: the `count` sums that an
    example touches are one vector that moves by at most sqrt(count) sensitivities. Later sums may depend on earlier
    releases.

    Sensitivity assumed: that of **one** sum under `adjacency`; C for add-remove and zero-out, 2C for replace-one,
    C bounds the norm of an example's vector.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise on a sum over the sensitivity of that sum; 0 means epsilon = infinity.
    count : int
        Number of sums one example takes part in, the largest over all examples.
    adjacency : Adjacency
        The adjacency of the sensitivity. A fixed order of batches is `zero-out`: removing an example would move the
        others.
    """

    noise_multiplier: float
    count: int = 1
    adjacency: Adjacency = Adjacency.ADD_REMOVE


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
        Largest L2 norm of the change of C S in that unit, 0 or more: `dpcore.stages.strategies.sensitivity`.
    steps : int
        Number of sums, 0 or more.
    strategy : str
        Name or digest of C.
    adjacency : Adjacency
        The adjacency of `sensitivity` and `noise_multiplier`.

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
        super().__post_init__()
        if self.sensitivity > self.noise_multiplier:
            _relative_noise(self.noise_multiplier, self.sensitivity)

    @property
    def mu(self) -> float:
        """Return mu of one Gaussian mechanism: 0 if nothing was moved, infinity without noise, else at least 1e-9."""
        if self.steps == 0 or self.sensitivity == 0.0:
            return 0.0
        return max(1e-9, self.sensitivity / self.noise_multiplier) if self.noise_multiplier > 0.0 else math.inf


# Events of Gaussian noise on sums over secretly sampled examples.


_MOST_EXAMPLES = 1 << 53
_MOST_BATCHES = 1 << 24


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
    adjacency = Adjacency.ADD_REMOVE


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
    adjacency = Adjacency.REPLACE_ONE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > self.dataset_size:
            raise ArgumentError(f"batch_size={self.batch_size!r}: must be at most dataset_size={self.dataset_size}")


@dataclass(frozen=True)
class TruncatedPoissonSampledGaussian(Event):
    """`steps` sums, each over a fresh secret Poisson sample that is cut down to at most `max_batch_size` examples.

    If more examples are drawn in a step, a uniformly random subset of exactly `max_batch_size` of them is kept. The
    step is then a mixture (`dpcore.accounting.phases`): in some steps the probability of an example differs from the
    rate.

    Sensitivity assumed: C, the bound on the norm of one example's vector, under either adjacency. Under add-remove a
    full batch exchanges one example for another, which the accounting counts as 2C.

    Parameters
    ----------
    dataset_size : int
        Number of examples that toss a coin, the one in question included.
    sample_rate : float
        Probability that an example lands in a step before the cut, 0 < sample_rate <= 1.
    max_batch_size : int
        Hard maximum of examples in a step.
    noise_multiplier : float
        Standard deviation of the noise on the sum over C; 0 means epsilon = infinity.
    steps : int
        Number of steps, 0 or more.
    adjacency : Adjacency
        Zero-out (the default: an example without a contribution still tosses its coin and takes its place) or
        add-remove.

    References
    ----------
    Zero-out: derived in `dpcore.accounting.phases`. Add-remove: dp-accounting 0.6, and arXiv 2508.15089.
    """

    dataset_size: int
    sample_rate: float
    max_batch_size: int
    noise_multiplier: float
    steps: int
    adjacency: Adjacency = Adjacency.ZERO_OUT

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_size > _MOST_EXAMPLES:
            raise ArgumentError("dataset_size: must be at most 2^53, beyond which float64 has no exact counts")
        if self.adjacency is Adjacency.REPLACE_ONE:
            raise ArgumentError("adjacency='replace-one': must be 'zero-out' or 'add-remove' for truncated sampling")


@dataclass(frozen=True)
class CyclicPoissonSampledGaussian(Event):
    """`steps` sums under banded noise; the examples of group t mod `groups` may enter step t, by secret Poisson coins.

    Every example belongs to one of `groups` fixed groups. The noise is C^{-1} Z with a lower-triangular C of at most
    `groups` bands. An example's possible steps are then at least `groups` apart, the columns of C at those steps have
    no row in common, and each of them is one Gaussian mechanism on its own rows, entered with probability
    `sample_rate`: the run is as private as ceil(steps / groups) steps of `PoissonSampledGaussian` whose sensitivity is
    the largest column norm of C.

    Sensitivity assumed: one example moves one sum by at most C (the clip norm), under zero-out; the groups stay as they
    are.

    Parameters
    ----------
    sample_rate : float
        Probability that an example of the step's group enters it, 0 < sample_rate <= 1.
    groups : int
        Number of groups, at least the number of bands of the strategy.
    noise_multiplier : float
        Standard deviation of a coordinate of Z over the clip norm; 0 means epsilon = infinity.
    sensitivity : float
        Largest column norm of the strategy.
    steps : int
        Number of steps, 0 or more.
    strategy : str
        Name or digest of the strategy.

    References
    ----------
    Choquette-Choo et al., "(Amplified) Banded Matrix Factorization: A unified approach to private training", 2023
    (amplification of banded strategies under cyclic Poisson sampling).
    """

    sample_rate: float
    groups: int
    noise_multiplier: float
    sensitivity: float
    steps: int
    strategy: str = "identity"
    adjacency = Adjacency.ZERO_OUT
    rules: ClassVar[validate.Rules] = {**Event.rules, "sensitivity": validate.positive}

    def __post_init__(self) -> None:
        super().__post_init__()
        _relative_noise(self.noise_multiplier, self.sensitivity)

    @property
    def participations(self) -> int:
        """The most steps that one example may enter."""
        return -(-self.steps // self.groups)


@dataclass(frozen=True)
class RandomAllocationGaussian(Event):
    """Epochs: in each, every example enters one of `batches` sums, drawn in secret, with Gaussian noise on each.

    Also known as balls in bins. The adjacency is add-remove: examples are drawn independently, so one more or less
    does not change the batches of the others. An epoch that ends early counts as a whole one.

    Sensitivity assumed: C, the bound on the norm of one example's vector. Each example enters each of the sums of an
    epoch with probability exactly 1 / batches, exactly one of them, independently of all others and of all other
    epochs; a full batch is never cut off.

    Parameters
    ----------
    batches : int
        Sums of an epoch, 1 or more.
    noise_multiplier : float
        Standard deviation of the noise on a sum over C; 0 means epsilon = infinity.
    epochs : int
        Number of epochs, 0 or more.

    References
    ----------
    Chua et al., "Balls-and-Bins Sampling for DP-SGD", 2024. Feldman, Shenfeld, "Privacy amplification by random
    allocation", 2025.
    """

    batches: int
    noise_multiplier: float
    epochs: int
    adjacency = Adjacency.ADD_REMOVE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batches > _MOST_BATCHES:
            raise ArgumentError(f"batches={self.batches}: must be at most 2^24, beyond which nothing is certified")


# Events made of other events, and the one that guarantees nothing.


_DEEPEST = 100  # events within events; far below Python's own limit of recursion


def _depth(parts: tuple[Event, ...]) -> int:
    """Return the depth of the nested parts; refuse too many levels."""
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
        if not hasattr(self.events, "__iter__"):
            raise ArgumentTypeError(f"events={self.events!r}: must be a tuple of events of dpcore.accounting")
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
        The repeated event.
    count : int
        Number of repetitions, 0 or more.
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


@dataclass(frozen=True)
class PrivateSelection(Event):
    """The best of K runs, K random: each the event `run`; only the best one is released, and nothing of the others.

    The best is so by a total order of what a run releases, or of that and public data. K follows the truncated negative
    binomial law of `shape` and mean `expected_runs`, or that of Poisson; it is independent of the data, as the settings
    of the runs are, and stays secret (`dpcore.accounting.selection`). A run that fails counts as the worst.

    Parameters
    ----------
    run : Event
        One run, itself no selection.
    expected_runs : float
        The mean of K: more than 1; above 0 under the law of Poisson, which may make no run at all. At most 1e9.
    shape : float, optional
        Above -1, at most 1e3: 1 is the geometric law, 0 the logarithmic one. None: Poisson.
    """

    run: Event
    expected_runs: float
    shape: float | None = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.plain(self)
        if any(isinstance(part, PrivateSelection) for part in nested(check_event(run=self.run))):
            raise ArgumentError("run: holds a PrivateSelection itself; a selection of selections is not covered")
        object.__setattr__(self, "_depth", _depth((self.run,)))
        runs = validate.positive(expected_runs=self.expected_runs)
        least = 0.0 if self.shape is None else 1.0
        if not least < runs <= 1e9:
            raise ArgumentError(f"expected_runs={runs!r}: must be more than {least:g} and at most 1e9 for this law")
        if self.shape is not None:
            if not -1.0 < validate.number(shape=self.shape) <= 1e3:
                raise ArgumentError(f"shape={self.shape!r}: must be above -1 and at most 1000, or None for Poisson")
            continuation(self.shape, runs)

    @property
    def adjacency(self) -> Adjacency | None:
        """That of a run."""
        return self.run.adjacency


def nested(event: Event) -> Iterator[Event]:
    """Yield the event and all events in it."""
    yield event
    for item in fields(event):
        value = getattr(event, item.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Event):
                yield from nested(part)
