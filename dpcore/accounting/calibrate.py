"""Calibration: a target (epsilon, delta) gives the one unknown setting of a plan.

`calibrate` takes `make_event`, a function from the unknown to the event, with all other settings fixed in it, and
assumes that epsilon moves one way with the unknown: down with the noise multiplier; up with the steps, the rate and the
batch size. That holds for every event of this package. Whether or not it holds, what is returned has an epsilon of at
most the target, by the accountant asked.

`spent` is what has been released about the same data already: the target is then that of both together, and the answer
says what is left. (Settings that depend on earlier results compose by a privacy filter, not like this: see the ledger.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from dpcore.accounting import base
from dpcore.accounting.events import Composed, Event, check_event
from dpcore.accounting.gaussian import gaussian_epsilon
from dpcore.accounting.phases import AllocationStep, Step, phases
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate

LARGEST = 1e7
SMALLEST = 1e-4
SMALLEST_RATE = 1e-9
MOST_STEPS = 10**9
TOLERANCE = 1e-6

PROBES: Final = {"noise_multiplier": 1.0, "steps": 1, "sample_rate": 0.01, "batch_size": 1}
"""The unknowns, each with a value at which the event's kind is seen."""


def calibrate(
    unknown: str,
    target_epsilon: float,
    target_delta: float,
    make_event: Callable[[Any], Event],
    accountant: str | base.Accountant | None = None,
    *,
    spent: Event | None = None,
    dataset_size: int | None = None,
) -> float:
    """Return the noise multiplier, the steps, the sample rate or the batch size that meets a target.

    Parameters
    ----------
    unknown : {"noise_multiplier", "steps", "sample_rate", "batch_size"}
        What is looked for: the least noise multiplier, or the most of one of the others.
    target_epsilon : float
        Greater than 0.
    target_delta : float
        0 < target_delta < 1.
    make_event : callable
        From the unknown to the event, with all other settings fixed. Epsilon must not grow with the noise multiplier,
        or fall with the others.
    accountant : str or Accountant, optional
        Which accountant's epsilon is meant; by default the first of `accountants_for` the event.
    spent : Event, optional
        What was released about the same data before; the target is that of both together.
    dataset_size : int, optional
        The number of examples, at least 1: the largest batch size. Batch sizes need it.

    Returns
    -------
    float
        A value whose epsilon is at most `target_epsilon`, always. Steps and batch sizes are whole numbers, and one more
        would be too many, unless the batch has all examples; 0 steps say that one is too many. The epsilon of a noise
        multiplier, or of a rate below 1, is at least (1 - tolerance) `target_epsilon`, unless the accountant's epsilon
        jumps there: RDP goes to 0 at once where the divergence falls below about delta^2. Then the value lies right
        behind the jump. The tolerance is 1e-3 for "pld" (1e-4 / `target_epsilon` for targets below 0.1), which rounds
        up by as much, and 1e-6 for the others.

    Raises
    ------
    ArgumentError
        If the target is out of reach of every noise multiplier between 1e-4 and 1e7, of a rate of 1e-9 or of a batch of
        one; if a billion steps still meet it; or if `spent` costs more than it.
    PrivacyError
        If the accountant does not cover the event.

    Examples
    --------
    >>> from dpcore.accounting import PoissonSampledGaussian, calibrate
    >>> sigma = calibrate("noise_multiplier", 3.0, 1e-5, lambda s: PoissonSampledGaussian(0.01, s, 1000), "rdp")
    >>> round(sigma, 3)
    0.865
    >>> calibrate("steps", 3.0, 1e-5, lambda steps: PoissonSampledGaussian(0.01, 0.8653, steps), "rdp")
    1000
    """
    unknown = validate.choice(PROBES, unknown=unknown)
    if unknown == "batch_size":
        most = validate.integer(dataset_size=dataset_size, minimum=1)
    ask = _Question(target_epsilon, target_delta, make_event, accountant, spent, unknown)
    if unknown == "noise_multiplier":
        value, met = _least(ask, 1.0, (SMALLEST, LARGEST), lambda noise: noise)
    elif unknown == "sample_rate":
        # Epsilon falls with the number of examples for each one that is drawn.
        gap, _ = _least(ask, 100.0, (1.0, 1.0 / SMALLEST_RATE), lambda gap: 1.0 / gap)
        value, met = 1.0 / gap, ask.epsilon(1.0 / gap) <= ask.target
    elif unknown == "steps":
        value, met = _greatest(ask, MOST_STEPS)
    else:
        value, met = _greatest(ask, most)[0], ask.epsilon(1) <= ask.target
    if met:
        return value
    value = max(value, 1) if unknown == "batch_size" else value
    reached = ask.epsilon(value)
    if reached > ask.target:
        raise ArgumentError(
            f"target_epsilon={target_epsilon!r}: even {unknown}={value:g} gives epsilon={reached:.6g}, and no "
            f"more private value is tried ({ask.accountant.floor}); raise target_epsilon or target_delta, or change "
            "the rest"
        )
    raise ArgumentError(
        f"target_epsilon={target_epsilon!r}: even {unknown}={value:g} gives only epsilon={reached:.6g}, and no "
        "less private value is tried; lower target_epsilon, or check that make_event uses what it is given"
    )


def _least(
    ask: _Question, start: float, limits: tuple[float, float], unknown: Callable[[float], float]
) -> tuple[float, bool]:
    guess, _ = least_meeting(lambda x: ask.estimate(unknown(x)), ask.target, start, limits, 1e-3)
    return least_meeting(lambda x: ask.epsilon(unknown(x)), ask.target, guess, limits, ask.tolerance)


def _greatest(ask: _Question, largest: int) -> tuple[int, bool]:
    guess, _ = greatest_meeting(ask.estimate, ask.target, 1000, largest)
    return greatest_meeting(ask.epsilon, ask.target, guess, largest)


class _Question:
    """A target, and epsilon as a function of the unknown, each value asked once."""

    def __init__(
        self,
        target_epsilon: float,
        target_delta: float,
        make_event: Callable[[Any], Event],
        accountant: str | base.Accountant | None,
        spent: Event | None,
        unknown: str,
    ) -> None:
        self.target = validate.positive(target_epsilon=target_epsilon)
        self.delta = validate.open_unit(target_delta=target_delta)
        if not callable(make_event):
            raise ArgumentTypeError(f"make_event={make_event!r}: must be a function from the {unknown} to an event")
        self._make_event: Callable[[Any], Event] = make_event
        self._spent = None if spent is None else check_event(spent=spent)
        self.accountant = base.find(accountant, self.event(PROBES[unknown]))
        self._known: dict[float, float] = {}
        if spent is not None:
            base.demand_support(self.accountant, spent)
            before = self.accountant.epsilon(spent, self.delta)
            if before > self.target:
                raise ArgumentError(
                    f"spent: costs epsilon={before:.6g} by itself, more than target_epsilon={target_epsilon!r}: "
                    "nothing is left"
                )

    def event(self, value: float) -> Event:
        """Return all that is released at that value."""
        event = self._make_event(value)
        return event if self._spent is None or not isinstance(event, Event) else Composed((self._spent, event))

    def epsilon(self, value: float) -> float:
        """Return epsilon at that value, by the accountant."""
        if value not in self._known:
            event = self.event(value)
            base.demand_support(self.accountant, event)
            self._known[value] = self.accountant.epsilon(event, self.delta)
        return self._known[value]

    def estimate(self, value: float) -> float:
        """Return a guess of epsilon at that value, in microseconds."""
        return estimated_epsilon(self.event(value), self.delta)

    @property
    def tolerance(self) -> float:
        """How far below the target the answer may be, relative to it."""
        # PLD rounds epsilon up by as much, differently at neighboring values.
        return max(1e-3, 1e-4 / self.target) if self.accountant.name == "pld" else TOLERANCE


# A guess of epsilon in microseconds, to begin a search at. It is no bound.
#
# By a central limit theorem, many sampled steps of small privacy loss are nearly one Gaussian mechanism with mu^2 the
# sum of the steps' chi-squared divergences, q^2 (exp(1/s^2) - 1).
#
# References
# ----------
# Bu, Dong, Long, Su, "Deep Learning with Gaussian Differential Privacy", 2020 (the central limit theorem under
# Poisson sampling).


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


# Searches for the setting at which epsilon meets its target.
#
# An accountant's epsilon costs milliseconds, and is nearly a power of the noise, the rate and the number of steps. So
# both searches draw straight lines in the logarithms, keep the answer between a value that meets the target and one
# that does not, and halve that range where a line does not shrink it.


_CLOSEST = 1e-12  # relative: a range this narrow holds a jump
_CLAMP = 50.0


def least_meeting(
    epsilon: Callable[[float], float], target: float, start: float, limits: tuple[float, float], tolerance: float
) -> tuple[float, bool]:
    """Return the least value with epsilon <= target, and whether it is that.

    `epsilon` must not grow with the value; it may be 0 or infinity. The result has epsilon between (1 - tolerance)
    target and target, or lies within 1e-12 of a value whose epsilon is above the target. With False, a limit ended the
    search: it is the largest value (if its epsilon is above the target) or the smallest (if its epsilon is below it).
    """
    tolerance = min(tolerance, 1.0)  # a target below what an accountant resolves: any epsilon at or below it will do
    aim = math.log(target) + math.log1p(-0.5 * tolerance)

    def excess(x: float) -> float:
        value = epsilon(math.exp(x))
        return max(-_CLAMP, min(_CLAMP, math.log(value) - aim)) if value > 0.0 else -_CLAMP

    smallest, largest = math.log(limits[0]), math.log(limits[1])
    x = min(max(math.log(start), smallest), largest)
    y, stretch = excess(x), 1.0
    up = epsilon(math.exp(x)) > target
    here, there = (x, y), (x, y)
    while (epsilon(math.exp(there[0])) > target) == up:
        end = largest if up else smallest
        if there[0] == end:
            return limits[1] if up else limits[0], False
        here = there
        step = stretch * min(math.log(4.0), 1.1 * abs(here[1]) + 1e-3)
        x = min(here[0] + step, largest) if up else max(here[0] - step, smallest)
        there, stretch = (x, excess(x)), 1.5 * stretch
    low, high = (here, there) if up else (there, here)
    return math.exp(_narrow(excess, lambda x: epsilon(math.exp(x)) > target, low, high, 0.5 * tolerance)), True


def _narrow(
    excess: Callable[[float], float],
    above: Callable[[float], bool],
    low: tuple[float, float],
    high: tuple[float, float],
    close: float,
) -> float:
    """Return the upper end of the range once its excess is at least -close, or once the range has closed.

    Points are (x, excess); `low` is above the target and `high` is not. Secants by the Illinois rule (the height of an
    end that stays twice is halved, so that both ends move), and every fourth time the middle.
    """
    (a, height_a), (b, height_b) = low, high
    reached, stayed, count = height_b, "", 0
    while reached < -close and b - a > _CLOSEST:
        count += 1
        x = b - height_b * (b - a) / (height_b - height_a) if count % 4 else 0.5 * (a + b)
        if not a < x < b:
            x = 0.5 * (a + b)
        y = excess(x)
        if above(x):
            height_b *= 0.5 if stayed == "high" else 1.0
            a, height_a, stayed = x, y, "high"
        else:
            height_a *= 0.5 if stayed == "low" else 1.0
            b, height_b, reached, stayed = x, y, y, "low"
    return b


def greatest_meeting(epsilon: Callable[[int], float], target: float, start: int, largest: int) -> tuple[int, bool]:
    """Return the greatest integer n in 0..largest with epsilon(n) <= target, and whether epsilon(n + 1) > target.

    `epsilon`, of an integer from 1 on, must not fall with it; it may be 0 or infinity. The second is False if n is
    `largest`.
    """
    low, high, stride = 0, min(max(start, 1), largest), 1.1
    if epsilon(high) <= target:
        while epsilon(high) <= target:
            if high == largest:
                return largest, False
            low, high, stride = high, min(max(high + 1, math.ceil(high * stride)), largest), stride * stride
    else:
        while low == 0 and high > 1:
            trial = max(1, min(high - 1, math.floor(high / stride)))
            if epsilon(trial) <= target:
                low = trial
            else:
                high, stride = trial, stride * stride
    count = 0
    while high - low > 1:
        count += 1
        trial = (low + high) // 2 if count % 3 == 0 else _between(epsilon, target, low, high)
        trial = min(max(trial, low + 1), high - 1)
        if epsilon(trial) <= target:
            low = trial
        else:
            high = trial
    return low, True


def _between(epsilon: Callable[[int], float], target: float, low: int, high: int) -> int:
    """Return where the straight line between both ends, in logarithms, meets the target, rounded down."""
    below, above = epsilon(low), epsilon(high)
    if not 0.0 < below < above < math.inf:
        return (low + high) // 2
    share = math.log(target / below) / math.log(above / below)
    return math.floor(math.exp(math.log(low) + share * math.log(high / low)))
