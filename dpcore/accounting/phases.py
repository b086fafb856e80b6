"""The parts of an event: one Gaussian mechanism, and sampled steps with their counts.

Every accountant starts here, so that all of them account for the same thing. Equal steps are counted together, whatever
order and nesting an event gives them: composition does not depend on the order.

Truncated Poisson sampling
--------------------------
Let U be the Poisson sample, i the example in question, m = |U minus i| ~ Bin(n - 1, q), B the maximum, S the batch (U,
or a uniformly random B-subset of it where |U| > B) and T = S minus i.

**Zero-out.** i tosses its coin in both data sets, so S has one distribution, and they differ in whether i's vector
enters where i is in S. Given |T|, the set T is uniform over the other examples, whether i is in S or not. So knowing T
reveals nothing about which data set it is, and given T the step is a Poisson-subsampled Gaussian whose rate is the
probability of i in S given |T|:

    |T| < B - 1:  the coin alone: q
    |T| = B - 1:  a / (a + b),  a = q (Pr[m = B-1] + sum_{k >= B} Pr[m = k] B/(k+1)),  b = (1-q) Pr[m = B-1]
    |T| = B:      i is not in S: 0

With binomials, sum_{k >= B} Pr[m = k] q B/(k+1) = (B/n) Pr[Bin(n, q) >= B + 1]. Telling the adversary T can only help
(joint convexity of every f-divergence), so the mixture of the three, weighted by how likely they are, bounds the step.

**Add-remove.** Without i there are n - 1 examples. If m < B nothing is cut off in either data set: rate q, sensitivity
C. If m >= B both have B examples, and i, if in S, stands in the place of another one: sensitivity 2C, with probability
(B/n) Pr[Bin(n, q) >= B + 1] / Pr[m >= B] given that m >= B. (dp-accounting 0.6 has the same weights and rates, and
takes Poisson sampling under replace-one for the steps that are cut off, at the same half multiplier: q N(1) against
q N(-1) next to the rest, which is twice as far apart. Its epsilon is
larger: by 8.7 % at its own test point (17.904 against 16.464: 3 steps of n = 4 and 2 of n = 3, q = 1/2, B = 2, sigma =
1, delta = 1e-6), 10.5 % for 1000 steps of n = 1000, q = 0.02, B = 21, sigma = 0.9, and 0.3 % for 20 steps of n = 1000,
q = 0.01, B = 15, sigma = 0.9, both at delta = 1e-5.)
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dpcore.accounting.events import (
    Adjacency,
    Composed,
    CyclicPoissonSampledGaussian,
    Event,
    FixedSizeSampledGaussian,
    Gaussian,
    MatrixGaussian,
    NonPrivate,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    SelfComposed,
    TruncatedPoissonSampledGaussian,
    check_event,
)
from dpcore.errors import PrivacyError
from dpcore.spec import validate

# Binomial probabilities by the incomplete beta function.
#
# Relative errors against 60 digits, for n from 10 to 2^53 and means from 0.01 to 1e10: at most 2e-13 + 6e-16 mean, and
# 3.1e-16 n more for n below 2^31 and means below 40. `_inexact` is a bound of twice to three times that. No error is
# proven. (`scipy.special.bdtr` is NaN from n = 2^31 on, and differences of `gammaln` have lost all digits at n = 1e15.)
#
# If probabilities have the relative error r, weights have it too, rates p (a ratio of two) have 2 r, and 1 - p has
# 2 r p / (1 - p). The products of these, the masses of a step's outcomes, have less than 6 r / (1 - p).


def _inexact(n: int, p: float) -> float:
    """Return a bound on the relative error of the probabilities below."""
    return 4e-13 + 2e-15 * n * p + (1e-15 * n if n < 2**32 and n * p < 100.0 else 0.0)


def at_most(k: int, n: int, p: float) -> float:
    """Return Pr[Bin(n, p) <= k]."""
    from scipy.special import betaincc

    return 0.0 if k < 0 else 1.0 if k >= n else float(betaincc(k + 1, n - k, p))


def more_than(k: int, n: int, p: float) -> float:
    """Return Pr[Bin(n, p) > k]."""
    from scipy.special import betainc

    return 1.0 if k < 0 else 0.0 if k >= n else float(betainc(k + 1, n - k, p))


def exactly(k: int, n: int, p: float) -> float:
    """Return Pr[Bin(n, p) = k], a difference of the smaller tails."""
    if k >= n * p:
        return more_than(k - 1, n, p) - more_than(k, n, p)
    return at_most(k, n, p) - at_most(k - 1, n, p)


@dataclass(frozen=True)
class PoissonStep:
    """A mixture of Poisson-subsampled Gaussians; each step draws one of them openly.

    Attributes
    ----------
    components : tuple of (weight, sample_rate, noise_multiplier)
        Weights add up to at most 1; with the remaining probability nothing about the example is released. Rates lie in
        (0, 1], multipliers above 0. No component at all: nobody takes part.
    error : float
        Bound on the relative error of the masses of outcomes that comes from weights and rates.
    """

    components: tuple[tuple[float, float, float], ...]
    error: float = 0.0


@dataclass(frozen=True)
class WithoutReplacementStep:
    """A Gaussian on the sum over a uniformly random subset of `batch_size` of `dataset_size`; replace-one.

    `noise_multiplier` is above 0 and relative to the sensitivity under replacement, 2C; batch_size < dataset_size.
    """

    dataset_size: int
    batch_size: int
    noise_multiplier: float
    error: ClassVar[float] = 0.0

    @property
    def sample_rate(self) -> float:
        """The probability that an example is in the subset."""
        return self.batch_size / self.dataset_size

    @property
    def components(self) -> tuple[tuple[float, float, float], ...]:
        """One, of weight 1: like those of a `PoissonStep`."""
        return ((1.0, self.sample_rate, self.noise_multiplier),)


LEAST_ALLOCATED = 0.25
"""Noise multiplier below which random allocation is accounted as if everyone took part in every epoch in the open."""


@dataclass(frozen=True)
class AllocationStep:
    """An epoch in which an example enters one of `batches` sums, each with the same probability; 2 batches or more."""

    batches: int
    noise_multiplier: float
    error: ClassVar[float] = 0.0

    @property
    def components(self) -> tuple[tuple[float, float, float], ...]:
        """A Gaussian mechanism in which it takes part, which is worse: like those of a `PoissonStep`."""
        return ((1.0, 1.0, self.noise_multiplier),)


Step = PoissonStep | WithoutReplacementStep | AllocationStep


@dataclass(frozen=True)
class Phases:
    """An event taken apart.

    Attributes
    ----------
    mu : float
        Parameter of the one Gaussian mechanism of all unsampled parts: 0 if there is none, infinity if anything is
        released without noise or without a guarantee (then `steps` does not matter).
    steps : tuple of (Step, int)
        Each sampled step and how often it occurs, at least once; no step occurs twice.
    """

    mu: float
    steps: tuple[tuple[Step, int], ...]


def phases(event: Event) -> Phases | None:
    """Return the event's phases; None if some part of it is of a kind unknown here."""
    squares: list[float] = []
    steps: Counter[Step] = Counter()
    for part, count in parts_of(event):
        own = _part(part)
        if own is None:
            return None
        mu, step, times = own
        # Not mu^2 summed with 0 * inf: a part that never happens has no mu.
        if mu > 0.0 and count > 0:
            squares.append(math.sqrt(count) * mu)
        if step is not None and times * count > 0:
            steps[step] = validate.integer(steps=steps[step] + times * count)
    return Phases(math.hypot(*squares), tuple(steps.items()))


def demand_phases(event: Event) -> Phases:
    """Return the event's phases, or raise `PrivacyError` if some part of it is of a kind unknown here."""
    result = phases(check_event(event=event))
    if result is None:
        raise PrivacyError(f"event={type(event).__name__}: it or a part of it is of a kind that no accountant covers")
    return result


def parts_of(event: Event, count: int = 1) -> Iterator[tuple[Event, int]]:
    """Yield every part of an event that is not composed, and how often it occurs, if the event does so `count` times.

    Raises `ArgumentError` if counts multiply beyond float64.
    """
    if isinstance(event, Composed):
        for part in event.events:
            yield from parts_of(part, count)
    elif isinstance(event, SelfComposed):
        yield from parts_of(event.repeated, validate.integer(count=count * event.count))
    else:
        yield event, count


def _part(event: Event) -> tuple[float, Step | None, int] | None:
    """Return mu, a step, and how often it occurs, of an event that is not composed."""
    if isinstance(event, NonPrivate):
        return math.inf, None, 0
    if isinstance(event, Gaussian):
        return _mu(event.noise_multiplier, event.count), None, 0
    if isinstance(event, MatrixGaussian):
        return event.mu, None, 0
    if isinstance(event, CyclicPoissonSampledGaussian):
        sigma = event.noise_multiplier / event.sensitivity
        event = PoissonSampledGaussian(event.sample_rate, sigma, event.participations)
    if isinstance(event, PoissonSampledGaussian):
        if event.sample_rate == 1.0 or event.noise_multiplier == 0.0:
            return _mu(event.noise_multiplier, event.steps), None, 0
        return 0.0, PoissonStep(((1.0, event.sample_rate, event.noise_multiplier),)), event.steps
    if isinstance(event, TruncatedPoissonSampledGaussian):
        if event.noise_multiplier == 0.0:
            return _mu(0.0, event.steps), None, 0
        components = truncated_components(event)
        if len(components) == 1 and components[0][0] == 1.0 and components[0][1] == 1.0:
            return _mu(components[0][2], event.steps), None, 0
        most = max((rate for _, rate, _ in components if rate < 1.0), default=0.0)
        exact = len(components) == 1 and components[0][0] == 1.0
        error = 0.0 if exact else 6.0 * _inexact(event.dataset_size, event.sample_rate) / (1.0 - most)
        return 0.0, PoissonStep(components, error), event.steps
    if isinstance(event, FixedSizeSampledGaussian):
        if event.batch_size == event.dataset_size or event.noise_multiplier == 0.0:
            return _mu(event.noise_multiplier, event.steps), None, 0
        step = WithoutReplacementStep(event.dataset_size, event.batch_size, event.noise_multiplier)
        return 0.0, step, event.steps
    if isinstance(event, RandomAllocationGaussian):
        if event.batches == 1 or event.noise_multiplier == 0.0:
            return _mu(event.noise_multiplier, event.epochs), None, 0
        return 0.0, AllocationStep(event.batches, event.noise_multiplier), event.epochs
    return None


def _mu(noise_multiplier: float, count: int) -> float:
    if count == 0:
        return 0.0
    return math.sqrt(count) / noise_multiplier if noise_multiplier > 0.0 else math.inf


def truncated_components(event: TruncatedPoissonSampledGaussian) -> tuple[tuple[float, float, float], ...]:
    """Return the mixture that a truncated step comes down to, as `PoissonStep.components`; derivation above."""
    n, q, most, sigma = event.dataset_size, event.sample_rate, event.max_batch_size, event.noise_multiplier
    if most >= n:
        return ((1.0, q, sigma),)
    cut = most / n * more_than(most, n, q)  # Pr[m >= B and i in S]
    if event.adjacency is Adjacency.ADD_REMOVE:
        full = more_than(most - 1, n - 1, q)  # Pr[m >= B]
        below = at_most(most - 1, n - 1, q)  # not 1 - full, which has no digits where full is nearly 1
        parts = [(below, q, sigma), (full, min(1.0, cut / full) if full > 0.0 else 0.0, sigma / 2.0)]
    else:
        almost = exactly(most - 1, n - 1, q)  # Pr[m = B - 1]
        inside, outside = q * almost + cut, (1.0 - q) * almost
        below = at_most(most - 2, n - 1, q)  # Pr[m < B - 1]
        weight = inside + outside
        parts = [(below, q, sigma), (weight, inside / weight if weight > 0.0 else 0.0, sigma)]
    # A weight never exceeds 1; `_inexact` is the error of each.
    kept = [(min(1.0, weight), rate, multiplier) for weight, rate, multiplier in parts if weight > 0.0 and rate > 0.0]
    if len(kept) == 1 and kept[0][1] < 1.0 and kept[0][0] > 1.0 - 1e-15:
        return ((1.0, *kept[0][1:]),)
    return tuple(kept)
