"""Calibration: a target (epsilon, delta) gives the one unknown setting of a plan.

Each function takes `make_event`, a function from the unknown to the event, with all other settings fixed in it, and
assumes that epsilon moves one way with the unknown: down with the noise multiplier; up with the steps, the rate and the
batch size. That holds for every event of this package. Whether or not it holds, what is returned has an epsilon of at
most the target, by the accountant asked.

`spent` is what has been released about the same data already: the target is then that of both together, and the answer
says what is left. (Settings that depend on earlier results compose by a privacy filter, not like this: see the ledger.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from dpcore.accounting import base
from dpcore.accounting.estimate import estimated_epsilon
from dpcore.accounting.events import Composed, Event
from dpcore.accounting.search import greatest_meeting, least_meeting
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate

LARGEST = 1e7
SMALLEST = 1e-4
SMALLEST_RATE = 1e-9
MOST_STEPS = 10**9
TOLERANCE = 1e-6

T = TypeVar("T", int, float)


class _Question(Generic[T]):
    """A target, and epsilon as a function of the unknown, each value asked once."""

    def __init__(
        self,
        target_epsilon: float,
        target_delta: float,
        make_event: Callable[[T], Event],
        accountant: str | base.Accountant | None,
        spent: Event | None,
        *,
        unknown: str,
        probe: T,
    ) -> None:
        self.target = validate.positive(target_epsilon=target_epsilon)
        self.delta = validate.open_unit(target_delta=target_delta)
        if not callable(make_event):
            raise ArgumentTypeError(f"make_event={make_event!r}: must be a function from {unknown} to an event")
        if spent is not None and not isinstance(spent, Event):
            raise ArgumentTypeError(f"spent={spent!r}: must be an event of dpcore.accounting")
        self._make_event: Callable[[T], Event] = make_event
        self._spent = spent
        self.accountant = base.find(accountant, self.event(probe))
        self._known: dict[T, float] = {}
        if spent is not None:
            base.demand_support(self.accountant, spent)
            before = self.accountant.epsilon(spent, self.delta)
            if before > self.target:
                raise ArgumentError(
                    f"spent: costs epsilon={before:.6g} by itself, more than target_epsilon={target_epsilon!r}: "
                    "nothing is left"
                )

    def event(self, value: T) -> Event:
        """Return all that is released at that value."""
        event = self._make_event(value)
        return event if self._spent is None or not isinstance(event, Event) else Composed((self._spent, event))

    def epsilon(self, value: T) -> float:
        """Return epsilon at that value, by the accountant."""
        if value not in self._known:
            event = self.event(value)
            base.demand_support(self.accountant, event)
            self._known[value] = self.accountant.epsilon(event, self.delta)
        return self._known[value]

    def estimate(self, value: T) -> float:
        """Return a guess of epsilon at that value, in microseconds."""
        return estimated_epsilon(self.event(value), self.delta)

    @property
    def tolerance(self) -> float:
        """How far below the target the answer may be, relative to it."""
        # PLD rounds epsilon up by as much, differently at neighboring values.
        return max(1e-3, 1e-4 / self.target) if self.accountant.name == "pld" else TOLERANCE


def calibrate_noise_multiplier(
    target_epsilon: float,
    target_delta: float,
    make_event: Callable[[float], Event],
    accountant: str | base.Accountant | None = None,
    *,
    spent: Event | None = None,
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
    accountant : str or Accountant, optional
        Which accountant's epsilon is meant; by default the first of `accountants_for` the event.
    spent : Event, optional
        What was released about the same data before; the target is that of both together.

    Returns
    -------
    float
        A multiplier whose epsilon is at most `target_epsilon`, always, and at least (1 - tolerance) `target_epsilon`,
        unless the accountant's epsilon jumps there: RDP goes to 0 at once where the divergence falls below about
        delta^2. Then it is the least multiplier beyond the jump. The tolerance is 1e-3 for "pld" (1e-4 /
        `target_epsilon` for targets below 0.1), which rounds up by as much, and 1e-6 for the others.

    Raises
    ------
    ArgumentError
        If the target is out of reach of every multiplier between 1e-4 and 1e7, or `spent` costs more than it.
    PrivacyError
        If the accountant does not cover the event.

    Examples
    --------
    >>> from dpcore.accounting import PoissonSampledGaussian, calibrate_noise_multiplier
    >>> sigma = calibrate_noise_multiplier(3.0, 1e-5, lambda s: PoissonSampledGaussian(0.01, s, 1000), "rdp")
    >>> round(sigma, 3)
    0.865
    """
    ask = _Question[float](
        target_epsilon, target_delta, make_event, accountant, spent, unknown="a noise multiplier", probe=1.0
    )
    limits = (SMALLEST, LARGEST)
    guess, _ = least_meeting(ask.estimate, ask.target, 1.0, limits, 1e-3)
    multiplier, met = least_meeting(ask.epsilon, ask.target, guess, limits, ask.tolerance)
    if met:
        return multiplier
    reached = ask.epsilon(multiplier)
    if reached > ask.target:
        raise ArgumentError(
            f"target_epsilon={target_epsilon!r}: even noise_multiplier={multiplier:g} gives epsilon={reached:.6g}, and "
            f"more noise is not tried ({ask.accountant.floor}); raise target_epsilon or target_delta, or take fewer "
            "steps"
        )
    raise ArgumentError(
        f"target_epsilon={target_epsilon!r}: even noise_multiplier={multiplier:g} gives epsilon={reached:.6g}, and "
        "less noise is not tried; lower target_epsilon, or check that make_event uses the multiplier it is given"
    )


def calibrate_steps(
    target_epsilon: float,
    target_delta: float,
    make_event: Callable[[int], Event],
    accountant: str | base.Accountant | None = None,
    *,
    spent: Event | None = None,
) -> int:
    """Return the largest number of steps whose event meets (target_epsilon, target_delta).

    Parameters
    ----------
    target_epsilon, target_delta, accountant, spent
        As in `calibrate_noise_multiplier`, which says when `PrivacyError` is raised.
    make_event : callable
        steps -> event, with all other settings fixed; epsilon must not fall with the steps.

    Returns
    -------
    int
        Steps whose epsilon is at most `target_epsilon`, where that of one more is above it; 0 if one is too many.

    Raises
    ------
    ArgumentError
        If a billion steps still meet the target, or `spent` costs more than it.

    Examples
    --------
    >>> from dpcore.accounting import PoissonSampledGaussian, calibrate_steps
    >>> calibrate_steps(3.0, 1e-5, lambda steps: PoissonSampledGaussian(0.01, 0.8653, steps), "rdp")
    1000
    """
    ask = _Question[int](target_epsilon, target_delta, make_event, accountant, spent, unknown="steps", probe=1)
    steps, met = _greatest(ask, MOST_STEPS)
    if not met:
        raise ArgumentError(
            f"target_epsilon={target_epsilon!r}: even {steps} steps cost only epsilon={ask.epsilon(steps):.6g}; lower "
            "target_epsilon, or check that make_event uses the steps it is given"
        )
    return steps


def calibrate_batch_size(
    target_epsilon: float,
    target_delta: float,
    make_event: Callable[[int], Event],
    dataset_size: int,
    accountant: str | base.Accountant | None = None,
    *,
    spent: Event | None = None,
) -> int:
    """Return the largest batch size up to `dataset_size` whose event meets (target_epsilon, target_delta).

    Parameters
    ----------
    target_epsilon, target_delta, accountant, spent
        As in `calibrate_noise_multiplier`, which says when `PrivacyError` is raised.
    make_event : callable
        batch_size -> event, with all other settings fixed; epsilon must not fall with the batch size.
    dataset_size : int
        Number of examples, at least 1.

    Returns
    -------
    int
        A batch size whose epsilon is at most `target_epsilon`: `dataset_size`, or one where that of the next is above.

    Raises
    ------
    ArgumentError
        If a batch of one is too many, or `spent` costs more than the target.
    """
    most = validate.integer(dataset_size=dataset_size, minimum=1)
    ask = _Question[int](target_epsilon, target_delta, make_event, accountant, spent, unknown="a batch size", probe=1)
    size, _ = _greatest(ask, most)
    if size == 0:
        raise ArgumentError(
            f"target_epsilon={target_epsilon!r}: even a batch of one example costs epsilon={ask.epsilon(1):.6g}; raise "
            "target_epsilon or the noise, or take fewer steps"
        )
    return size


def calibrate_sample_rate(
    target_epsilon: float,
    target_delta: float,
    make_event: Callable[[float], Event],
    accountant: str | base.Accountant | None = None,
    *,
    spent: Event | None = None,
) -> float:
    """Return the largest sampling rate whose event meets (target_epsilon, target_delta).

    Parameters
    ----------
    target_epsilon, target_delta, accountant, spent
        As in `calibrate_noise_multiplier`, which says when `PrivacyError` is raised.
    make_event : callable
        sample_rate -> event, with all other settings fixed; epsilon must not fall with the rate.

    Returns
    -------
    float
        A rate whose epsilon is at most `target_epsilon`: 1.0, or one whose epsilon is as close below the target as
        `calibrate_noise_multiplier` promises.

    Raises
    ------
    ArgumentError
        If even a rate of 1e-9 is too much, or `spent` costs more than the target.
    """
    ask = _Question[float](
        target_epsilon, target_delta, make_event, accountant, spent, unknown="a sample rate", probe=0.01
    )
    # In the number of examples for each one that is drawn, 1 / rate, epsilon falls.
    limits = (1.0, 1.0 / SMALLEST_RATE)
    guess, _ = least_meeting(lambda gap: ask.estimate(1.0 / gap), ask.target, 100.0, limits, 1e-3)
    gap, met = least_meeting(lambda gap: ask.epsilon(1.0 / gap), ask.target, guess, limits, ask.tolerance)
    if not met and ask.epsilon(1.0 / gap) > ask.target:
        raise ArgumentError(
            f"target_epsilon={target_epsilon!r}: even sample_rate={1.0 / gap:g} gives epsilon="
            f"{ask.epsilon(1.0 / gap):.6g} ({ask.accountant.floor}); raise target_epsilon or target_delta, or take "
            "fewer steps or more noise"
        )
    return 1.0 / gap


def _greatest(ask: _Question[int], largest: int) -> tuple[int, bool]:
    guess, _ = greatest_meeting(ask.estimate, ask.target, 1000, largest)
    return greatest_meeting(ask.epsilon, ask.target, guess, largest)
