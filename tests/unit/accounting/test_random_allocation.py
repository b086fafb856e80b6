"""Random allocation: its certified curve beside published brackets, quadrature, the attack, and its own two bounds."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import integrate
from scipy.special import ndtr

from dpcore import accounting
from dpcore.accounting import (
    Adjacency,
    Gaussian,
    PoissonSampledGaussian,
    PrivateSelection,
    RandomAllocationGaussian,
    delta_interval,
    epsilon_interval,
)  # fmt: skip
from dpcore.accounting.pld import allocation as lognormal
from dpcore.accounting.pld.allocation import Allocation, Law, _checked, ranges, transformed
from dpcore.accounting.pld.tradeoff import trade_off
from dpcore.accounting.renyi import log_moments_allocation
from dpcore.errors import ArgumentError, PrivacyError
from tests.depth import chosen
from tests.refused import refused


@pytest.mark.parametrize(
    ("sigma", "batches", "low", "high"),
    [(1.0, 8, 3.711, 3.726), (1.0, 64, 1.792, 1.806), (2.0, 64, 0.315, 0.345), (1.0, 128, 1.253, 1.270)],
)
def test_epsilon_lies_in_the_published_brackets(sigma: float, batches: int, low: float, high: float) -> None:
    found = epsilon_interval(RandomAllocationGaussian(batches, sigma, 1), 1e-8)
    assert low <= found.lower <= found.upper <= high
    assert found.gap <= 1e-3 * found.upper


def call(strike: float, mean: float, sigma: float) -> float:
    """E (mean X - strike)+, for a strike of any sign, in closed form."""
    if strike <= 0.0:
        return mean - strike
    z = sigma * math.log(mean / strike) + 0.5 / sigma
    return float(mean * ndtr(z) - strike * ndtr(z - 1.0 / sigma))


def exact_delta(sigma: float, batches: int, epsilon: float) -> float:
    """The larger one of both directions, by quadrature over all X but one: t = 2 or 3."""
    x = lambda z: math.exp(z / sigma - 0.5 / sigma**2)  # noqa: E731
    weight = lambda z: math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)  # noqa: E731

    def above(a: float) -> float:
        if batches == 2:
            inner = lambda z: weight(z) * call(a - x(z) / 2, 0.5, sigma)  # noqa: E731
            return float(integrate.quad(inner, -12, 12 + 1 / sigma, epsabs=1e-14, epsrel=1e-10, limit=400)[0])
        z, w = np.polynomial.hermite_e.hermegauss(180)
        w = w / math.sqrt(2.0 * math.pi)
        values = np.exp(z / sigma - 0.5 / sigma**2)
        total = 0.0
        for one, its in zip(values, w, strict=True):
            total += its * sum(
                float(v) * call(a - (one + other) / 3, 1 / 3, sigma) for other, v in zip(values, w, strict=True)
            )
        return float(total)

    ratio = math.exp(epsilon)
    return max(above(ratio), 1.0 - ratio + ratio * above(1.0 / ratio))


@pytest.mark.parametrize(("sigma", "epsilon"), [(0.8, 0.5), (0.8, 3.0), (1.0, 0.1), (1.5, 1.0), (3.0, 0.4), (0.5, 6.0)])
def test_two_batches_equal_quadrature(sigma: float, epsilon: float) -> None:
    exact = exact_delta(sigma, 2, epsilon)
    lower, upper = delta_interval(RandomAllocationGaussian(2, sigma, 1), epsilon)
    assert lower * (1 - 1e-7) <= exact <= upper * (1 + 1e-7)
    assert upper - lower <= 2e-3 * exact


@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 1.0), (2.0, 0.3)])
def test_three_batches_equal_quadrature(sigma: float, epsilon: float) -> None:
    lower, upper = delta_interval(RandomAllocationGaussian(3, sigma, 1), epsilon)
    exact = exact_delta(sigma, 3, epsilon)
    # Gauss-Hermite meets the kink of the call but roughly.
    assert lower * 0.995 <= exact <= upper * 1.005


def test_epochs_compose() -> None:
    # "Remove" alone, by powers of the law of the loss of t = 2, which quadrature gives on a grid of its own.
    sigma, h = 1.0, 3e-3
    edges = np.arange(-12.0, 12.0, h)
    z = np.linspace(-9.0, 10.0, 1001)
    weight = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    rest = 2 * np.exp(edges)[:, None] - np.exp(z / sigma - 0.5 / sigma**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        place = np.where(rest > 0, sigma * np.log(np.maximum(rest, 1e-300)) + 0.5 / sigma, -np.inf)
    below = 0.5 * (ndtr(place - 1 / sigma) @ weight + ndtr(place) @ (weight * np.exp(z / sigma - 0.5 / sigma**2)))
    p = np.diff(below)
    size = 1 << 17
    for epochs, epsilon in itertools.product((2, 5), (1.0, 4.0)):
        composed = np.maximum(np.fft.irfft(np.fft.rfft(p, size) ** epochs, size), 0.0)
        losses = epochs * (edges[0] + 0.5 * h) + h * np.arange(size)
        delta = float((composed * np.maximum(0.0, -np.expm1(np.minimum(epsilon - losses, 0.0)))).sum())
        lower, upper = delta_interval(RandomAllocationGaussian(2, sigma, epochs), epsilon)
        assert lower * 0.999 <= delta <= upper * 1.001


@given(sigma=st.floats(0.4, 4.0), g=st.floats(0.005, 5.0), strike=st.floats(0.01, 40.0))
def test_the_law_of_one_is_larger_and_smaller_in_the_convex_order(sigma: float, g: float, strike: float) -> None:
    points, end = 300, 300 * g
    assume(strike < end)
    whole = call(strike, 1.0, sigma)
    upper = lognormal.split(sigma, g, points, 0.0, end)
    at, edges = lognormal.bins(sigma, g, points)
    p, q = (float(mass[0]) for mass in lognormal.masses(sigma, np.array([end, np.inf])))
    grid = g * np.arange(points + 1)
    assert (upper * np.maximum(grid - strike, 0)).sum() + (p - strike * q) >= whole * (1 - 1e-9) - 1e-13
    assert (upper * grid).sum() + p == pytest.approx(1.0, abs=1e-9)
    for rising in (False, True):
        lower = lognormal.merged(sigma, at, edges, 0.0, end, rising)
        assert lower.min() >= 0.0
        assert lower.sum() <= 1.0 + 1e-12
        if rising:  # E (strike - X)+ falls
            assert (lower * np.maximum(strike - at, 0)).sum() <= whole - 1.0 + strike + 1e-12
        else:
            assert (lower * np.maximum(at - strike, 0)).sum() <= whole + 1e-12


@settings(max_examples=max(30, settings().max_examples))
@given(sigma=st.floats(0.5, 4.0), batches=st.integers(2, 3000), remove=st.booleans(), share=st.floats(0.0, 3.0))
def test_the_lower_law_is_never_above_the_upper_one(sigma: float, batches: int, remove: bool, share: float) -> None:
    direction = "remove" if remove else "add"
    theta = share * math.sqrt(batches / math.expm1(sigma**-2))
    found = Allocation(batches, sigma, np.ones(1, np.int64), -30.0, theta, 0.1, 1 << 12)
    high, low = (replace(found, bound=bound).law(direction) for bound in ("upper", "lower"))
    for epsilon in np.linspace(-1.0, 3.0, 9):
        above = high.infinite + (high.p * np.maximum(0, -np.expm1(np.minimum(epsilon - high.losses, 0)))).sum()
        below = (low.p * np.maximum(0, -np.expm1(np.minimum(epsilon - low.losses, 0)))).sum()
        assert below <= above * (1 + 1e-9)
    assert low.p.sum() <= 1.0 + 1e-9
    # Whatever is cut off counts as lost: an upper bound has all of the mass.
    short = replace(found, log_rare=-8.0).law(direction)
    assert short.p.sum() + short.infinite >= 1.0 - 1e-12


@pytest.mark.parametrize(("sigma", "batches"), [(0.5, 300), (1.0, 20), (2.0, 2000)])
def test_ranges_add_up_to_the_whole_sum(sigma: float, batches: int) -> None:
    cap = math.exp(7.0 / sigma)
    parts = [
        transformed(batches, sigma, low, high, 0.0, 1 << 13, lower=False, add=False, last=high == cap)
        for low, high in ranges(batches, sigma, cap)
    ]
    mean = sum(float((part.plain(part.sums) * part.values).sum()) for part in parts) / batches
    assert sum(float(part.plain(part.sums).sum()) for part in parts) == pytest.approx(1.0, abs=1e-9)
    p, _ = lognormal.masses(sigma, np.array([cap, np.inf]))
    assert mean == pytest.approx(1.0 - p[0], abs=2e-3)


def test_it_is_never_below_a_simulated_attack() -> None:
    sigma, batches, trials = 1.0, 8, 400_000
    generator = np.random.default_rng(5)
    noise = sigma * generator.standard_normal((2, trials, batches))
    noise[1, np.arange(trials), generator.integers(batches, size=trials)] += 1.0
    scores = np.exp((noise - 0.5) / sigma**2).mean(axis=2)
    event = RandomAllocationGaussian(batches, sigma, 1)
    for epsilon in (0.5, 1.0, 2.0):
        for out, inside in ((scores[0], scores[1]), (1 / scores[1], 1 / scores[0])):
            hit, false = (inside > math.exp(epsilon)).mean(), (out > math.exp(epsilon)).mean()
            attack = hit - math.exp(epsilon) * false
            spread = 4.0 * math.sqrt((hit + math.exp(2 * epsilon) * false) / trials)
            assert attack <= delta_interval(event, epsilon).upper + spread
    hit, false = (scores[1] > math.e).mean(), (scores[0] > math.e).mean()
    assert hit - math.e * false == pytest.approx(delta_interval(event, 1.0).lower, abs=3e-3)  # the attack is optimal


MANY = [(0.6, 1000, 10), (0.7, 10_000, 100), (2.0, 2000, 20)]


@pytest.mark.parametrize(("sigma", "batches", "epochs"), chosen(MANY[:2], MANY))
def test_many_batches_are_certified_too(sigma: float, batches: int, epochs: int) -> None:
    found = epsilon_interval(RandomAllocationGaussian(batches, sigma, epochs), 1e-7)
    assert 0 < found.lower < found.upper <= found.lower + 2e-3 * found.upper


def test_little_noise_is_accounted_without_amplification_and_ends() -> None:
    for sigma in (0.01, 0.1, 0.24):
        event, known = RandomAllocationGaussian(100, sigma, 3), accounting.epsilon(Gaussian(sigma, 3), 1e-5)
        found = epsilon_interval(event, 1e-5)
        assert found.upper == pytest.approx(known, rel=1e-6)
        assert accounting.epsilon(event, 1e-5, "rdp") == pytest.approx(
            accounting.epsilon(Gaussian(sigma, 3), 1e-5, "rdp"), rel=1e-12
        )
    assert epsilon_interval(RandomAllocationGaussian(100, 0.25, 1), 1e-5).lower > 0.0
    for sigma in (0.01, 0.25, 5.0):
        parts = ranges(100, sigma, 2000.0)
        assert len(parts) <= 9
        assert parts[0][0] == 0.0
        assert parts[-1][1] == 2000.0
        assert all(earlier[1] == later[0] for earlier, later in itertools.pairwise(parts))


@pytest.mark.parametrize("noise", [1.2598952777950274, 1.299308784200416])
def test_two_batches_of_much_noise_beside_little_noise(noise: float) -> None:
    # The mean loss of these four steps under the tilt is one that the epoch never has.
    event, beside = RandomAllocationGaussian(2, 67.34346672408275, 1), Gaussian(noise, 3)
    alone, all_in = (accounting.epsilon(one, 1e-18) for one in (beside, Gaussian((3 / noise**2 + 67.3**-2) ** -0.5)))
    lower, upper = epsilon_interval(accounting.Composed((event, beside)), 1e-18)
    assert alone * (1 - 2e-3) <= lower <= upper <= all_in * (1 + 2e-3)
    assert upper <= lower * (1 + 5e-3)


QUIET = [(20.0, 0.5), (20.0, 4.0), (300.0, 2.0), (20.0, 2.0), (300.0, 0.5)]


@pytest.mark.parametrize(("sigma", "share"), chosen(QUIET[:3], QUIET))
def test_two_batches_of_much_noise_equal_quadrature(sigma: float, share: float) -> None:
    epsilon = share / sigma
    lower, upper = delta_interval(RandomAllocationGaussian(2, sigma, 1), epsilon)
    exact = exact_delta(sigma, 2, epsilon)
    assert lower * (1 - 1e-5) <= exact <= upper * (1 + 1e-5)
    assert upper <= 1.02 * exact


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("bound", ["upper", "lower"])
def test_a_loss_of_interest_that_no_epoch_has(direction: str, bound: str) -> None:
    found = Allocation(2, 67.3, np.ones(1, np.int64), -53.0, 5.5, 6.9, 7680, bound).law(direction)
    assert found.p.sum() + found.infinite == pytest.approx(1.0, abs=1e-4)


def test_a_tilt_under_which_a_range_underflows_is_not_taken_for_exact() -> None:
    settings = {"lower": False, "add": True, "last": True}
    found = transformed(2, 20.0, 1.12, 1.52, -2318.0, 1 << 14, **settings)
    assert found.sums.max() < 1e-300
    assert found.plain(np.full(1 << 14, found.error)).max() > 1.0


def test_an_upper_bound_that_lost_mass_is_refused() -> None:
    some = np.array([0.1, 0.2, 0.3])
    whole = Law(some, np.array([0.2, 0.3, 0.5]), some, 0.0)
    assert _checked(whole, "upper") is whole
    refused(PrivacyError, "float64", _checked, replace(whole, p=np.array([0.2, 0.3, 0.4])), "upper")
    refused(PrivacyError, "float64", _checked, replace(whole, p=whole.p[:1]), "lower")


def test_moments_are_those_of_quadrature() -> None:
    sigma, z = 1.2, np.linspace(-14, 14, 1501)
    weight = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    x = np.exp(z / sigma - 0.5 / sigma**2)
    ratio = (x[:, None] + x) / 2
    orders = np.array([1.5, 2.0, 3.0, 5.0])
    found = log_moments_allocation(2, sigma, orders)
    for order, bound in zip(orders, found, strict=True):
        both = [np.log(weight @ ratio**power @ weight) for power in (order, 1 - order)]
        assert max(both) <= bound * (1 + 1e-9)
        assert order < 2 or bound <= 1.03 * max(both)


def test_renyi_epsilons_are_upper_bounds_that_a_ledger_can_use() -> None:
    event = RandomAllocationGaussian(100, 1.0, 10)
    renyi = accounting.epsilon(event, 1e-6, "rdp")
    assert epsilon_interval(event, 1e-6).upper < renyi < 1.3 * epsilon_interval(event, 1e-6).lower
    assert accounting.smallest_epsilon(event, 1e-6)[1] == "pld"


def test_events() -> None:
    event = RandomAllocationGaussian(8, 1.0, 3)
    assert accounting.Event.from_dict(event.to_dict()) == event
    assert event.adjacency is Adjacency.ADD_REMOVE
    assert accounting.epsilon(RandomAllocationGaussian(1, 1.0, 3), 1e-5) == accounting.epsilon(Gaussian(1.0, 3), 1e-5)
    assert accounting.epsilon(RandomAllocationGaussian(8, 0.0, 3), 1e-5) == math.inf
    assert accounting.epsilon(RandomAllocationGaussian(8, 1.0, 0), 1e-5) == 0.0
    composed = accounting.Composed((event, PoissonSampledGaussian(0.01, 1.0, 100), Gaussian(5.0)))
    alone = epsilon_interval(event, 1e-6)
    both = epsilon_interval(composed, 1e-6)
    assert alone.upper < both.lower < both.upper < both.lower * 1.002
    for arguments, words in (((0, 1.0, 1), "batches"), ((8, -1.0, 1), "noise_multiplier"), ((8, 1.0, -1), "epochs"),
                             ((1 << 25, 1.0, 1), "2\\^24")):  # fmt: skip
        refused(ArgumentError, words, RandomAllocationGaussian, *arguments)


QUIET = RandomAllocationGaussian(10, 0.2, 1)


def test_below_the_least_noise_bounds_are_those_without_sampling() -> None:
    """No grid has such losses; a mechanism in which everyone takes part in the open has no less loss."""
    whole = Gaussian(0.2, 1)
    curve = trade_off(QUIET, [0.01, 0.1])
    assert curve.advantage.lower <= math.erf(1 / (math.sqrt(8) * 0.2)) <= curve.advantage.upper * (1 + 1e-9)
    assert all(curve.lower <= [0.01, 0.1])
    assert accounting.delta(QUIET, 60.0) == pytest.approx(accounting.delta(whole, 60.0), rel=1e-6)
    assert accounting.epsilon(QUIET, 1e-5) == pytest.approx(accounting.epsilon(whole, 1e-5), rel=1e-6)
    many = RandomAllocationGaussian(1 << 20, 0.2, 1)
    assert trade_off(many, [0.01]).upper[0] <= 1
    assert math.isfinite(accounting.smallest_epsilon(PrivateSelection(many, 10), 1e-5)[0])
