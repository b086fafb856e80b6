"""Calibration: a target (epsilon, delta) gives the one unknown setting of a plan.

`calibrate` assumes that epsilon moves one way with the unknown: down with the noise multiplier; up with the steps, the
rate and the batch size. That holds for every event of this package. Even if it does not, the result has an epsilon of
at most the target, by the chosen accountant.

(Settings that depend on earlier results compose by a privacy filter, not by `spent`: see the ledger.)
"""

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from dpcore.accounting import base
from dpcore.accounting.events import Composed, Event, PrivateSelection, check_event
from dpcore.accounting.gaussian import gaussian_epsilon
from dpcore.accounting.phases import AllocationStep, Step, phases
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate

# For each unknown: a value to call make_event with once, to see the kind of event; where the search begins; and the
# ends of the search, the most private value first.
UNKNOWNS: Final[dict[str, tuple[float, float, float, float]]] = {
    "noise_multiplier": (1.0, 1.0, 1e7, 1e-4),
    "steps": (1, 1000, 1, 10**9),
    "sample_rate": (0.01, 0.01, 1e-9, 1.0),
    "batch_size": (1, 1000, 1, 10**9),
}
TOLERANCE = 1e-6


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
        The setting to find: the least noise multiplier, or the largest value of one of the others.
    target_epsilon : float
        Greater than 0.
    target_delta : float
        0 < target_delta < 1.
    make_event : callable
        From the unknown to the event, with all other settings fixed.
    accountant : str or Accountant, optional
        Which accountant's epsilon is meant; by default the first of `accountants_for` the event.
    spent : Event, optional
        Earlier releases about the same data; the target is then that of both together.
    dataset_size : int, optional
        The number of examples, at least 1: the largest batch size. Batch sizes need it.

    Returns
    -------
    float
        A value whose epsilon is at most `target_epsilon`, always. Steps and batch sizes are whole numbers, and one more
        would be too many, unless the batch has all examples; 0 steps say that one is too many. The epsilon of a noise
        multiplier, or of a rate below 1, is at least (1 - tolerance) `target_epsilon`, unless the accountant's epsilon
        jumps there: RDP drops to 0 when the divergence falls below about delta^2. Then the value is right behind the
        jump. The tolerance is 1e-3 for "pld" (1e-4 / `target_epsilon` for targets below 0.1), which rounds
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
    unknown = validate.choice(UNKNOWNS, unknown=unknown)
    _, start, most, least = UNKNOWNS[unknown]
    if unknown == "batch_size":
        least = validate.integer(dataset_size=dataset_size, minimum=1)
    ask = _Question(target_epsilon, target_delta, make_event, accountant, spent, unknown)
    whole = isinstance(most, int)
    guess = least_private(ask.estimate, ask.target, start, (most, least), None if whole else 1e-3)
    value = least_private(ask.epsilon, ask.target, guess, (most, least), None if whole else ask.tolerance)
    reached = ask.epsilon(value)
    if reached > ask.target and unknown == "steps":
        return 0
    if reached > ask.target:
        raise ArgumentError(
            f"target_epsilon={target_epsilon!r}: even {unknown}={value:g} gives epsilon={reached:.6g}, and no "
            f"more private value is tried ({ask.accountant.floor}); raise target_epsilon or target_delta, or change "
            "the rest"
        )
    if value == least and unknown in ("noise_multiplier", "steps"):
        raise ArgumentError(
            f"target_epsilon={target_epsilon!r}: even {unknown}={value:g} gives only epsilon={reached:.6g}, and no "
            "less private value is tried; lower target_epsilon, or check that make_event uses its argument"
        )
    return value


class _Question:
    """A target, and epsilon as a function of the unknown, computed once for each value."""

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
        self.accountant = base.find(accountant, self.event(UNKNOWNS[unknown][0]))
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
        return max(1e-3, 1e-4 / self.target) if self.accountant.name in ("pld", "selection") else TOLERANCE


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
    """Return an approximate epsilon at delta; infinity if the event is of an unknown kind."""
    if isinstance(event, PrivateSelection):
        return (2.0 + (event.shape or 0.0)) * estimated_epsilon(event.run, delta / event.expected_runs)
    parts = phases(event)
    if parts is None:
        return math.inf
    square = parts.mu * parts.mu + math.fsum(count * _divergence(step) for step, count in parts.steps)
    return gaussian_epsilon(math.sqrt(square), delta)


def _divergence(step: Step) -> float:
    if isinstance(step, AllocationStep):
        return math.expm1(min(step.noise_multiplier**-2, 300.0)) / step.batches
    terms = (weight * q * q * math.expm1(min(1.0 / (sigma * sigma), 300.0)) for weight, q, sigma in step.components)
    return math.fsum(terms)


# The search for the setting at which epsilon meets its target.
#
# An accountant's epsilon costs milliseconds, and is nearly a power of the noise, the rate and the number of steps. So
# the search draws straight lines in the logarithms, keeps the answer between a value that meets the target and one that
# does not, and halves that range if a line does not shrink it.


_CLOSEST = 1e-12  # relative: a range this narrow has a jump
_CLAMP = 50.0


class _Point(NamedTuple):
    value: float
    height: float  # log of epsilon over the target
    meets: bool


def least_private(
    epsilon: Callable[[Any], float], target: float, start: float, limits: tuple[float, float], tolerance: float | None
) -> float:
    """Return the least private value with epsilon <= target, between the most and the least private one, the `limits`.

    Epsilon must not fall from the first limit to the second; it may be 0 or infinity. With a tolerance, the result's
    epsilon is between (1 - tolerance) target and target, or it is within 1e-12 of a value whose epsilon is above the
    target. Without one, values are whole numbers, and the next one does not meet the target. If no value meets it, the
    first limit is returned; if all do, the second.
    """
    whole = tolerance is None
    close = 0.5 * min(tolerance or 0.0, 1.0)  # for a target below an accountant's resolution, any epsilon will do
    aim, (low, high) = math.log(target) + math.log1p(-close), sorted(limits)

    def at(x: float, between: tuple[float, float] = (low, high)) -> _Point:
        """Look at the value of logarithm x, or at the nearest one between two."""
        value = min(max(round(math.exp(x)) if whole else math.exp(x), between[0]), between[1])
        reached = epsilon(value)
        height = max(-_CLAMP, min(_CLAMP, math.log(reached) - aim)) if reached > 0.0 else -_CLAMP
        return _Point(value, height, reached <= target)

    here, stretch = at(math.log(min(max(start, low), high))), 1.0
    up = not here.meets  # toward more private values
    end = limits[0] if up else limits[1]
    side = 1 if end == high else -1
    while here.value != end:
        step = stretch * min(math.log(4.0), 1.1 * abs(here.height) + 1e-3)
        beyond = (here.value + 1, high) if side > 0 else (low, here.value - 1)
        there = at(math.log(here.value) + side * step, beyond if whole else (low, high))
        if there.meets == up:
            return _narrowed(at, *((here, there) if up else (there, here)), close, whole)
        here, stretch = there, 1.5 * stretch
    return end


def _narrowed(at: Callable[..., _Point], above: _Point, meets: _Point, close: float, whole: bool) -> float:
    """Return the value that meets the target once its height is at least -close, or once the range has closed.

    Secants by the Illinois rule (the height of an end that stays twice is halved, so that both ends move), and every
    fourth time the middle.
    """
    (a, height_a), (b, height_b), reached, stayed, count = above[:2], meets[:2], meets.height, "", 0
    while abs(a - b) > 1 if whole else reached < -close and abs(math.log(a / b)) > _CLOSEST:
        count += 1
        x, y = math.log(a), math.log(b)
        middle = y - height_b * (y - x) / (height_b - height_a) if count % 4 else 0.5 * (x + y)
        if not min(x, y) < middle < max(x, y):
            middle = 0.5 * (x + y)
        point = at(middle, (min(a, b) + 1, max(a, b) - 1)) if whole else at(middle)
        if point.meets:
            height_a *= 0.5 if stayed == "above" else 1.0
            b, height_b, reached, stayed = point.value, point.height, point.height, "above"
        else:
            height_b *= 0.5 if stayed == "meets" else 1.0
            a, height_a, stayed = point.value, point.height, "meets"
    return b
