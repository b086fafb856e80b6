"""Calibration of each unknown: never above the target, close below it, and what is left of it."""

import math
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore import accounting
from dpcore.accounting import calibrate
from dpcore.accounting.calibrate import least_private
from dpcore.accounting.events import Composed, Event, FixedSizeSampledGaussian, Gaussian, PoissonSampledGaussian
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from tests.refused import refused
from tests.unit.pld_work import counted

POISSON = PoissonSampledGaussian(0.01, 1.1, 1000)
EVENT_MAKERS: dict[str, Callable[[float], Callable[[float], Event]]] = {
    "poisson": lambda q: lambda sigma: PoissonSampledGaussian(q, sigma, 2000),
    "gaussian": lambda q: lambda sigma: Gaussian(sigma, 1 + int(100 * q)),
    "fixed size": lambda q: lambda sigma: FixedSizeSampledGaussian(10_000, 1 + int(5000 * q), sigma, 50),
}
EXACT = 1e-6  # the tolerance of the accountants that need no discretization


def poisson_at(sigma: float) -> PoissonSampledGaussian:
    return PoissonSampledGaussian(0.01, sigma, 100)


@given(st.floats(-1.2, 2.5), st.floats(-9, -2), st.floats(-4, 0), st.sampled_from(sorted(EVENT_MAKERS)))
def test_noise_meets_its_target(log_epsilon: float, log_delta: float, log_rate: float, kind: str) -> None:
    target, delta, make = 10.0**log_epsilon, 10.0**log_delta, EVENT_MAKERS[kind](10.0**log_rate)
    for name in {"rdp", "gaussian"} & set(accounting.accountants_for(make(1.0))):
        sigma = calibrate("noise_multiplier", target, delta, make, name)
        reached = accounting.epsilon(make(sigma), delta, name)
        assert reached <= target
        # Right behind RDP's jump to 0, or near the target.
        assert accounting.epsilon(make(sigma * (1 - 1e-9)), delta, name) > target or reached >= target * (1 - EXACT)


@given(st.floats(-1, 1.5), st.floats(-9, -3), st.floats(-3, -0.5), st.floats(-0.3, 0.7))
def test_steps_meet_their_target(log_epsilon: float, log_delta: float, log_rate: float, log_sigma: float) -> None:
    target, delta, q, sigma = 10.0**log_epsilon, 10.0**log_delta, 10.0**log_rate, 10.0**log_sigma

    def make(steps: int) -> Event:
        return PoissonSampledGaussian(q, sigma, steps)

    steps = calibrate("steps", target, delta, make, "rdp")
    assert accounting.epsilon(make(steps), delta, "rdp") <= target < accounting.epsilon(make(steps + 1), delta, "rdp")


@given(st.floats(0, 1.5), st.floats(-9, -3), st.floats(0, 4), st.floats(0, 1))
def test_rate_meets_its_target(log_epsilon: float, log_delta: float, log_steps: float, log_sigma: float) -> None:
    target, delta, steps, sigma = 10.0**log_epsilon, 10.0**log_delta, int(10.0**log_steps), 10.0**log_sigma

    def make(q: float) -> Event:
        return PoissonSampledGaussian(q, sigma, steps)

    rate = calibrate("sample_rate", target, delta, make, "rdp")
    reached = accounting.epsilon(make(rate), delta, "rdp")
    assert reached <= target
    # Below the target by more than the tolerance only at the end of the range, or right before RDP's jump to 0.
    jump = rate < 1 and accounting.epsilon(make(rate * (1 + 1e-9)), delta, "rdp") > target
    assert rate == 1.0 or jump or reached >= target * (1 - EXACT)


def test_batch_size_meets_its_target() -> None:
    def make(size: int) -> Event:
        return FixedSizeSampledGaussian(10_000, size, 0.8, 200)

    size = calibrate("batch_size", 4.0, 1e-6, make, "rdp", dataset_size=10_000)
    assert accounting.epsilon(make(size), 1e-6, "rdp") <= 4.0 < accounting.epsilon(make(size + 1), 1e-6, "rdp")
    assert calibrate("batch_size", 1e5, 1e-6, make, "rdp", dataset_size=10_000) == 10_000
    with pytest.raises(ArgumentError, match=r"target_epsilon=0\.001: even batch_size=1 gives epsilon="):
        calibrate("batch_size", 0.001, 1e-9, make, "rdp", dataset_size=10_000)
    refused(ArgumentError, "dataset_size=0", calibrate, "batch_size", 1.0, 1e-9, make, "rdp", dataset_size=0)


def test_of_the_gaussian_it_is_the_analytic_one() -> None:
    sigma = calibrate("noise_multiplier", 1.3, 1e-6, lambda sigma: Gaussian(sigma, 7), "gaussian")
    assert sigma == pytest.approx(accounting.analytic_noise_multiplier(1.3, 1e-6, 7), rel=2e-6)
    # Gaussian privacy: mu = sqrt(steps)/sigma.
    steps = calibrate("steps", 1.3, 1e-6, lambda steps: Gaussian(30.0, steps), "gaussian")
    assert steps == math.floor((30.0 / accounting.analytic_noise_multiplier(1.3, 1e-6)) ** 2)


def test_what_is_left() -> None:
    # Two runs of one Gaussian mechanism each: mu^2 adds up.
    whole = accounting.analytic_noise_multiplier(2.0, 1e-6)
    spent = Gaussian(2.0 * whole)
    sigma = calibrate("noise_multiplier", 2.0, 1e-6, Gaussian, "gaussian", spent=spent)
    assert sigma == pytest.approx(whole / math.sqrt(0.75), rel=1e-5)
    steps = calibrate("steps", 2.0, 1e-6, lambda steps: Gaussian(20.0 * whole, steps), "gaussian", spent=spent)
    assert steps in (299, 300)
    rate = calibrate(
        "sample_rate", 2.0, 1e-5, lambda q: PoissonSampledGaussian(q, 1.0, 500), "rdp", spent=Gaussian(5.0)
    )
    together = Composed((Gaussian(5.0), PoissonSampledGaussian(rate, 1.0, 500)))
    assert 2.0 * (1 - EXACT) <= accounting.epsilon(together, 1e-5, "rdp") <= 2.0
    with pytest.raises(ArgumentError, match=r"spent: costs epsilon=.* more than target_epsilon=2\.0: nothing is left"):
        calibrate("noise_multiplier", 2.0, 1e-6, Gaussian, "gaussian", spent=Gaussian(0.9 * whole))
    refused(ArgumentTypeError, "spent=3", calibrate, "noise_multiplier", 2.0, 1e-6, Gaussian, "gaussian", spent=3)
    with pytest.raises(ArgumentError, match="replace-one cannot be composed with another adjacency"):
        calibrate("noise_multiplier", 2.0, 1e-6, poisson_at, spent=FixedSizeSampledGaussian(10, 2, 5.0, 1))


def test_nothing_left_is_zero_steps() -> None:
    spent = Gaussian(accounting.analytic_noise_multiplier(2.0, 1e-6) * 1.0001)
    assert calibrate("steps", 2.0, 1e-6, lambda steps: Gaussian(1.0, steps), "gaussian", spent=spent) == 0


def test_is_quick() -> None:
    with counted() as work:
        calibrate("noise_multiplier", 3.0, 1e-5, lambda sigma: PoissonSampledGaussian(0.004, sigma, 2345))
    # Six multipliers are looked at, each with four or five short transforms.
    assert 0 < len(work.transforms) <= 30
    assert sum(work.transforms) < 2**21


def test_says_why_a_target_is_out_of_reach() -> None:
    # An order has a floor: with no divergence at all it finds log(1/(alpha delta))/(alpha-1) + log(1-1/alpha).
    with pytest.raises(ArgumentError, match=r"target_epsilon=0\.05: even noise_multiplier=1e\+07 .* 8192"):
        calibrate("noise_multiplier", 0.05, 1e-300, poisson_at, "rdp")
    with pytest.raises(ArgumentError, match="check that make_event uses its"):
        calibrate("noise_multiplier", 50.0, 1e-5, lambda sigma: POISSON)
    with pytest.raises(ArgumentError, match=r"even noise_multiplier=1e\+07 gives epsilon=inf"):
        calibrate("noise_multiplier", 1.0, 1e-5, lambda sigma: accounting.NonPrivate("a baseline"))
    with pytest.raises(ArgumentError, match=r"even steps=1e\+09 gives only epsilon=.* check that make_event uses"):
        calibrate("steps", 50.0, 1e-5, lambda steps: POISSON, "rdp")
    with pytest.raises(ArgumentError, match=r"even sample_rate=1e-09 gives epsilon=inf"):
        calibrate("sample_rate", 1.0, 1e-5, lambda q: accounting.NonPrivate("a baseline"))
    with pytest.raises(PrivacyError, match="accountant='gaussian': does not cover the event Poisson"):
        calibrate("noise_multiplier", 1.0, 1e-5, poisson_at, "gaussian")


@pytest.mark.parametrize("unknown", ["noise_multiplier", "steps", "sample_rate", "batch_size"])
def test_refuses_mistyped_arguments(unknown: str) -> None:
    ask = partial(calibrate, unknown, dataset_size=100)
    for bad in (0, 1, -0.1, 1.5, math.nan, math.inf):
        refused(ArgumentError, "target_delta=", ask, 1.0, bad, poisson_at)
    for bad in (-0.1, 0, math.nan, math.inf):
        refused(ArgumentError, "target_epsilon=", ask, bad, 1e-5, poisson_at)
    refused(ArgumentTypeError, r"make_event=3: must be a function from .* to an event", ask, 1.0, 1e-5, 3)
    refused(ArgumentTypeError, "event=None: must be an event", ask, 1.0, 1e-5, lambda value: None)


@given(st.floats(0.1, 6), st.floats(-3, 3), st.floats(-3, 3), st.floats(-9, -2))
def test_search_of_a_power(power: float, log_target: float, log_start: float, log_tolerance: float) -> None:
    target, tolerance, asked = 10.0**log_target, 10.0**log_tolerance, []

    def epsilon(value: float) -> float:
        asked.append(value)
        return value**-power

    value = least_private(epsilon, target, 10.0**log_start, (1e60, 1e-60), tolerance)
    assert target * (1 - tolerance) <= value**-power <= target
    assert len(set(asked)) < 60


@given(st.floats(0.2, 3), st.floats(-1, 3), st.integers(-5, 10**7), st.integers(1, 10**6))
def test_search_of_an_integer_power(power: float, log_scale: float, start: int, largest: int) -> None:
    scale, asked = 10.0**log_scale, set()

    def epsilon(value: int) -> float:
        assert 1 <= value <= largest
        asked.add(value)
        return float(value) ** power / scale

    value = least_private(epsilon, 1.0, start, (1, largest), None)
    assert value == 1 or value**power / scale <= 1.0
    assert value == largest or (value + (value**power / scale <= 1.0)) ** power / scale > 1.0
    assert len(asked) < 80
