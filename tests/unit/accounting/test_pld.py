"""Certified privacy-loss distributions: bounds of a step, extremes, trade-offs.

Their truth is tested in test_certified.py and test_pld_oracle.py.
"""

import math
import tracemalloc
import warnings

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from dpcore import accounting
from dpcore.accounting import Adjacency, Composed, Event, Gaussian, Interval, NonPrivate, SelfComposed, trade_off
from dpcore.accounting.events import FixedSizeSampledGaussian, PoissonSampledGaussian, TruncatedPoissonSampledGaussian
from dpcore.accounting.gaussian import gaussian_epsilon, log_delta
from dpcore.accounting.phases import Phases, PoissonStep, WithoutReplacementStep
from dpcore.accounting.pld import curve, delta_interval, epsilon_interval, intervals, loss, tradeoff
from dpcore.accounting.renyi import RdpAccountant
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from tests.depth import chosen
from tests.refused import refused
from tests.unit.pld_work import counted


def close_enough(interval: Interval, tolerance: float = 1.0) -> bool:
    return interval.gap <= tolerance * max(1e-3 * interval.upper, 1e-4)


@pytest.mark.parametrize(("mu", "steps", "delta"), [
    (1.0, 1, 1e-5), (0.1, 100, 1e-5), (0.01, 10_000, 1e-5), (1.0, 2_000, 1e-5), (0.05, 1_000, 1e-60), (0.3, 10, 0.3),
])  # fmt: skip
def test_discretized_gaussian_holds_the_exact_value(mu: float, steps: int, delta: float) -> None:
    forced = Phases(0.0, ((PoissonStep(((1.0, 1.0, 1.0 / mu),)), steps),))
    found = intervals._epsilon(forced, delta, None)
    exact = gaussian_epsilon(mu * math.sqrt(steps), delta)
    assert found.lower <= exact <= found.upper * (1 + 1e-12)  # which is the same one at times
    assert close_enough(found)
    # The same curve the other way round, at a sharper tolerance.
    back = intervals._delta(forced, exact, 1e-5 * delta)
    assert back.lower <= math.exp(log_delta(mu * math.sqrt(steps), exact)) <= back.upper
    assert back.gap <= 1e-3 * delta


FAMILIES = [
    loss.families([(PoissonStep(((1.0, 0.05, 0.6),)), 1)])[0],
    loss.families([(PoissonStep(((1.0, 1e-4, 0.4),)), 1)])[0],
    loss.families([(PoissonStep(((0.6, 0.2, 1.0), (0.3, 0.4, 0.5))), 1)])[0],
    loss.families([(WithoutReplacementStep(100, 7, 0.8), 1)])[0],
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("h", [0.002, 0.05, 0.6])
def test_bounds_of_a_step_lie_on_either_side(family: loss.Family, direction: str, h: float) -> None:
    offsets = loss.center(family, direction, h)
    low, high = family.reach(direction, 8.0, 8.0)
    grid = loss.points(float(((low - offsets) / h).min()), float(((high - offsets) / h).max()), 16)
    above = loss.upper(family, direction, h, offsets, grid)
    below = loss.lower(family, direction, h, offsets, grid, above.p)
    assert np.all(above.p >= 0.0)
    assert np.all(below.p >= 0.0)
    assert below.p.sum() <= 1.0 + 1e-12
    spread = float(np.sqrt((above.p * above.losses**2).sum()))
    for epsilon in np.concatenate([np.linspace(-3.0, 3.0, 41) * spread, np.linspace(0.0, float(high.max()), 30)]):
        edges = np.array([[epsilon, np.inf]])
        p, q = family.masses(direction, edges)
        exact = float(p[0, 0] - math.exp(epsilon) * q[0, 0])
        upper = float((above.p * np.maximum(0.0, -np.expm1(epsilon - above.losses))).sum() + above.infinite[0])
        lower = float((below.p * np.maximum(0.0, -np.expm1(epsilon - below.losses))).sum())
        assert lower <= exact + 1e-14
        assert upper >= exact - 1e-14


# fmt: off
EXTREMES = [  # with some epsilons
    (PoissonSampledGaussian(1e-4, 0.4, 10**5), 1e-6),  # nearly all steps release nearly nothing
    (PoissonSampledGaussian(0.5, 0.3, 1000), 1e-6), (PoissonSampledGaussian(0.1, 0.3, 10**5), 1e-6),  # 2,753, 31,850
    (PoissonSampledGaussian(1e-6, 10.0, 1000), 1e-6), (PoissonSampledGaussian(1e-6, 0.3, 10**6), 1e-7),  # 6e-7
    (PoissonSampledGaussian(0.01, 0.5, 100), 1e-15), (PoissonSampledGaussian(0.01, 1.0, 1000), 1e-250),
    (PoissonSampledGaussian(0.01, 1.0, 10**6), 1e-5), (PoissonSampledGaussian(1e-5, 0.3, 1000), 1e-3),
    (PoissonSampledGaussian(0.999, 1.0, 1000), 1e-5), (PoissonSampledGaussian(0.5, 1.0, 1), 1e-5),
    (FixedSizeSampledGaussian(60_000, 256, 0.5, 10_000), 1e-6),
    (TruncatedPoissonSampledGaussian(1000, 0.01, 3, 0.5, 10_000), 1e-6),
    (PoissonSampledGaussian(1e-5, 0.6, 100_000), 1e-8), (PoissonSampledGaussian(1e-4, 1.0, 532), 1.4e-11),
    (PoissonSampledGaussian(0.1, 1.0, 1_000_000), 1e-5), (PoissonSampledGaussian(0.1, 1.0, 10_000_000), 1e-5),
]
# fmt: on


@pytest.mark.parametrize(("event", "delta"), chosen(EXTREMES[::2], EXTREMES))
def test_extremes_reach_the_tolerance_in_little_memory(event: object, delta: float) -> None:
    intervals._epsilon.cache_clear()
    tracemalloc.start()
    found = epsilon_interval(event, delta)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.0 < found.lower <= found.upper < math.inf
    assert close_enough(found, 1.001)
    assert peak < 200e6
    if isinstance(event, PoissonSampledGaussian):
        assert RdpAccountant().epsilon(event, delta) >= found.lower


@pytest.mark.parametrize("event", [PoissonSampledGaussian(0.3, 0.7, 1), FixedSizeSampledGaussian(100, 10, 0.7, 1)])
def test_epsilon_is_0_from_the_total_variation_of_a_step_on(event: PoissonSampledGaussian) -> None:
    rate = 0.3 if isinstance(event, PoissonSampledGaussian) else 0.1
    variation = rate * (ndtr(0.5 / 0.7) - ndtr(-0.5 / 0.7))
    assert delta_interval(event, 0.0).lower <= variation <= delta_interval(event, 0.0).upper
    assert epsilon_interval(event, 1.001 * variation) == Interval(0.0, 0.0)
    assert epsilon_interval(event, 0.9 * variation).lower > 0.0


@pytest.mark.parametrize("sigma", [1e-5, 0.001, 0.01, 0.05])
def test_hardly_any_noise_gives_finite_certified_bounds(sigma: float) -> None:
    found = epsilon_interval(PoissonSampledGaussian(0.01, sigma, 10), 1e-5)
    assert 0.0 <= found.lower <= found.upper < math.inf
    assert found.upper > 0.2 / sigma**2


@pytest.mark.parametrize("sigma", [9e-7, 1e-9])
def test_next_to_no_noise_is_bounded_as_if_nothing_were_sampled(sigma: float) -> None:
    event = PoissonSampledGaussian(0.9, sigma, 10)
    assert epsilon_interval(event, 1e-9).lower == 0.0
    assert 9.9 < epsilon_interval(event, 1e-9).upper * 2.0 * sigma**2 < 10.1
    assert delta_interval(event, 1.0) == Interval(0.0, 1.0)


@pytest.mark.parametrize(("sigma", "steps"), [(7e-6, 1_300_000_000), (2e-6, 3 * 10**10), (1e-4, 3 * 10**11)])
def test_sums_of_losses_that_float64_does_not_resolve_are_bounded_without_sampling(sigma: float, steps: int) -> None:
    for event in (PoissonSampledGaussian(0.7, sigma, steps), FixedSizeSampledGaussian(640, 446, sigma, steps)):
        found = epsilon_interval(event, 1e-9)
        assert found.lower == 0.0 < found.upper == pytest.approx(steps / (2 * sigma**2), rel=1e-3)
        assert delta_interval(event, 1e4) == Interval(0.0, 1.0)


@pytest.mark.parametrize("count", [10**31, 10**300])
def test_beyond_the_digits_of_float64_nothing_is_certified(count: int) -> None:
    event = Gaussian(1e-9, count)  # mu is 3e24 and more
    found = epsilon_interval(event, 1e-9)
    assert 0.0 < found.lower < found.upper == math.inf
    assert delta_interval(event, found.lower) == Interval(0.0, 1.0)
    assert (gaussian_epsilon(math.inf, 1e-9), accounting.delta(event, 1e30, "gaussian")) == (math.inf, 1.0)


def test_schedule_equals_its_grouped_form() -> None:
    grouped = (PoissonSampledGaussian(0.01, 1.0, 300), PoissonSampledGaussian(0.02, 1.5, 200), Gaussian(4.0, 2))
    parts = (PoissonSampledGaussian(0.01, 1.0, 3), PoissonSampledGaussian(0.02, 1.5, 2)) * 100
    scattered = Composed((*parts, SelfComposed(Gaussian(4.0, 1), 2)))
    first, second = epsilon_interval(Composed(grouped), 1e-6), epsilon_interval(scattered, 1e-6)
    assert tuple(first) == pytest.approx(tuple(second), rel=1e-9)


def test_trade_off_of_a_gaussian_holds_the_exact_one() -> None:
    forced = TruncatedPoissonSampledGaussian(1, 0.999999999, 1, 1.0, 1)  # not a plain Gaussian, but next to it
    for event, slack in ((Gaussian(1.0), 1e-12), (forced, 1e-6)):
        found = trade_off(event)
        exact = ndtr(1.0 + ndtri(found.false_positive_rates))
        assert np.all(found.lower <= exact * (1.0 + slack))
        assert np.all(found.upper >= exact * (1.0 - slack))
        assert np.all(found.upper - found.lower <= 0.02 * exact)
        assert found.advantage.lower - slack <= 2.0 * ndtr(0.5) - 1.0 <= found.advantage.upper + slack


def test_curve_agrees_with_single_deltas() -> None:
    event = PoissonSampledGaussian(0.05, 1.0, 50)
    epsilons = [2.0, 0.0, 0.7, 5.0]
    lower, upper = curve(event, epsilons)
    for k, epsilon in enumerate(epsilons):
        single = delta_interval(event, epsilon)
        assert lower[k] <= single.upper
        assert upper[k] >= single.lower
        assert upper[k] - lower[k] <= 0.02 * upper[k]


def test_the_bounds_of_a_curve_never_rise_with_epsilon(monkeypatch) -> None:
    """As delta does not: at 10^9 steps rounding leaves them apart, and those of a neighbor may be the closer ones."""
    found = np.array([1e-9, 0.4, 1e-7, 0.01]), np.array([1e-5, 0.5, 1e-4, 0.6])
    monkeypatch.setattr(tradeoff, "_curve", lambda *_: found)
    lower, upper = curve(PoissonSampledGaussian(1e-4, 3.0, 10**9), [7.0, 0.0, 5.0, 2.0])
    assert lower.tolist() == [1e-9, 0.4, 1e-7, 0.01]
    assert upper.tolist() == [1e-5, 0.5, 1e-4, 0.5]
    found = np.array([1e-7, 0.4, 1e-9, 1e-9]), np.array([1e-5, 0.5, 1e-4, 0.1])
    lower, _ = curve(PoissonSampledGaussian(1e-4, 3.0, 10**9), [7.0, 0.0, 5.0, 2.0])
    assert lower.tolist() == [1e-7, 0.4, 1e-7, 1e-7]


RARE = [(1e-5, 0.6, 10_000), (1e-5, 1.0, 10_000), (1e-6, 0.8, 100_000)]


@pytest.mark.parametrize(("q", "sigma", "steps"), chosen(RARE[:2], RARE))
def test_the_attacker_of_many_rare_events_takes_few_looks(q: float, sigma: float, steps: int) -> None:
    """Rounding keeps the ends of delta apart there; a look at each epsilon of the curve took minutes."""
    event = PoissonSampledGaussian(q, sigma, steps)
    with counted() as work:
        found = trade_off(event, [1e-3, 1e-2])
    assert len(work.transforms) <= 30
    assert found.advantage.gap <= 0.011 * found.advantage.upper
    assert np.all(found.upper - found.lower <= 0.1 * found.upper)
    single = delta_interval(event, 0.0)
    assert found.advantage.lower <= single.upper
    assert found.advantage.upper >= single.lower
    for k in range(1, len(found.epsilons), chosen(61, 17)):
        single = delta_interval(event, float(found.epsilons[k]))
        assert found.delta_lower[k] <= single.upper
        assert found.delta_upper[k] >= single.lower


@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.5, 0.3, 1000), (0.1, 0.4, 6000)])
def test_an_attacker_who_is_always_right(q: float, sigma: float, steps: int) -> None:
    """Epsilon is above 700: ratios of likelihoods that no float64 holds, and none needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trade_off(PoissonSampledGaussian(q, sigma, steps))
    assert np.all(found.lower > 1.0 - 1e-9)
    assert np.all(np.isfinite(found.delta_upper))
    assert len(np.unique(np.exp(found.epsilons))) == len(found.epsilons)


def test_nothing_and_everything() -> None:
    nothing = PoissonSampledGaussian(0.1, 1.0, 0)
    assert epsilon_interval(nothing, 1e-5) == delta_interval(nothing, 1.0) == Interval(0.0, 0.0)
    for everything in (NonPrivate("test"), PoissonSampledGaussian(0.1, 0.0, 1)):
        assert epsilon_interval(everything, 1e-5) == Interval(math.inf, math.inf)
        assert epsilon_interval(everything, 1e-5).gap == 0.0
        assert delta_interval(everything, 1.0) == Interval(1.0, 1.0)
        assert np.all(trade_off(everything).lower == 1.0)
    exact = epsilon_interval(Gaussian(0.7, 3), 1e-6)
    assert exact.lower <= gaussian_epsilon(math.sqrt(3.0) / 0.7, 1e-6) <= exact.upper
    assert exact.gap < 1e-8
    assert len(repr(trade_off(Gaussian(1.0)))) < 200  # of thousands of numbers


def test_tolerance_is_met_and_absolute() -> None:
    for event in (PoissonSampledGaussian(0.01, 1.1, 1000), PoissonSampledGaussian(0.2, 0.7, 300)):  # epsilon above 20
        sharp, loose = epsilon_interval(event, 1e-6, tolerance=1e-5), epsilon_interval(event, 1e-6, tolerance=0.1)
        assert sharp.gap <= 1e-5
        assert loose.gap <= 0.1
        lower, upper = loose
        assert lower <= sharp.upper
        assert upper >= sharp.lower


@pytest.mark.parametrize(("phases", "steps"), [(1000, 1), (300, 10)])
def test_many_distinct_phases_take_one_round(phases: int, steps: int) -> None:
    parts = (PoissonSampledGaussian(0.004 + 3e-3 * k / phases, 1.0 + 0.5 * k / phases, steps) for k in range(phases))
    event = Composed(tuple(parts))
    with counted() as work:
        found = epsilon_interval(event, 1e-5)
    # A first look and an upper bound in each direction, and the lower bound of the worse one.
    assert len(work.transforms) == 5
    assert work.points < 2000 * phases  # about 1000 each
    assert close_enough(found)


def test_bad_input_is_named() -> None:
    event = PoissonSampledGaussian(0.01, 1.1, 1000)
    refused(ArgumentError, "delta", epsilon_interval, event, 0.0)
    refused(ArgumentError, "tolerance", epsilon_interval, event, 1e-5, tolerance=0.0)
    refused(ArgumentError, "epsilon", delta_interval, event, -1.0)
    refused(ArgumentTypeError, "event", epsilon_interval, 3.0, 1e-5)
    refused(ArgumentError, "false_positive_rates", trade_off, event, [0.0])

    class Unknown(Event):
        adjacency = Adjacency.ADD_REMOVE

    refused(PrivacyError, "Unknown", epsilon_interval, Unknown(), 1e-5)
