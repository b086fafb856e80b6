"""The public functions: names, refusals, calibration, and golden figures."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcore import accounting
from dpcore.accounting import (
    Event,
    FixedSizeSampledGaussian,
    Gaussian,
    NonPrivate,
    PoissonSampledGaussian,
    RdpAccountant,
    calibrate_noise_multiplier,
)
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError

POISSON = PoissonSampledGaussian(0.01, 1.1, 1000)
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "accounting.json").read_text())


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['event']['event']}-{row['accountant']}-{row['delta']:g}")
def test_golden_figures(row: dict[str, object]) -> None:
    event = Event.from_dict(row["event"])  # type: ignore[arg-type]
    figure = accounting.epsilon(event, row["delta"], row["accountant"])  # type: ignore[arg-type]
    assert figure == pytest.approx(row["epsilon"], rel=1e-9)


def test_which_accountants_there_are() -> None:
    assert accounting.available_accountants() == ("rdp", "gaussian")
    assert accounting.accountants_for(POISSON) == ("rdp",)
    assert accounting.accountants_for(PoissonSampledGaussian(1.0, 1.0, 1)) == ("rdp", "gaussian")
    assert accounting.accountants_for(Gaussian(1.0)) == ("rdp", "gaussian")
    assert accounting.accountants_for(NonPrivate("a baseline")) == ("rdp", "gaussian")
    assert accounting.accountants_for(FixedSizeSampledGaussian(10, 2, 1.0, 1)) == ()


def test_an_accountant_can_be_given_as_an_object() -> None:
    assert accounting.epsilon(POISSON, 1e-5, RdpAccountant()) == accounting.epsilon(POISSON, 1e-5)
    coarse = accounting.epsilon(POISSON, 1e-5, RdpAccountant(orders=(8.0,)))
    assert coarse == accounting.epsilon(POISSON, 1e-5, orders=[8])
    assert coarse >= accounting.epsilon(POISSON, 1e-5)


@pytest.mark.parametrize("ask", [accounting.epsilon, accounting.delta])
def test_refuses_accountants(ask: Callable[..., float]) -> None:
    with pytest.raises(ArgumentError, match=r"accountant='pld': PLD .* has not landed .* accountant='rdp'"):
        ask(POISSON, 0.5, accountant="pld")
    with pytest.raises(ArgumentError, match="did you mean 'gaussian'"):
        ask(POISSON, 0.5, accountant="gausian")
    with pytest.raises(ArgumentTypeError, match="accountant=3"):
        ask(POISSON, 0.5, accountant=3)
    with pytest.raises(PrivacyError, match=r"does not cover the event Poisson.* use accountant='rdp'"):
        ask(POISSON, 0.5, accountant="gaussian")
    with pytest.raises(ArgumentError, match="only accountant='rdp' takes orders"):
        ask(Gaussian(1.0), 0.5, accountant="gaussian", orders=[2])
    with pytest.raises(ArgumentTypeError, match="must be an event"):
        ask("Gaussian", 0.5)


@pytest.mark.parametrize("name", ["rdp", "gaussian"])
def test_fixed_size_sampling_names_the_remedy(name: str) -> None:
    with pytest.raises(PrivacyError, match=r"without replacement; use Poisson sampling .* or a fixed order"):
        accounting.epsilon(FixedSizeSampledGaussian(10, 2, 1.0, 1), 1e-5, name)


@pytest.mark.parametrize("bad", [0, 1, -0.1, 1.5, math.nan, math.inf])
def test_refuses_delta_outside_of_its_interval(bad: float) -> None:
    with pytest.raises(ArgumentError, match="delta="):
        accounting.epsilon(POISSON, bad)
    with pytest.raises(ArgumentError, match="target_delta="):
        calibrate_noise_multiplier(1.0, bad, Gaussian)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_refuses_bad_epsilon(bad: float) -> None:
    with pytest.raises(ArgumentError, match="epsilon="):
        accounting.delta(POISSON, bad)
    with pytest.raises(ArgumentError, match="target_epsilon="):
        calibrate_noise_multiplier(bad, 1e-5, Gaussian)


EVENT_MAKERS: dict[str, Callable[[float], Callable[[float], Event]]] = {
    "poisson": lambda q: lambda sigma: PoissonSampledGaussian(q, sigma, 2000),
    "gaussian": lambda q: lambda sigma: Gaussian(sigma, 1 + int(100 * q)),
}


@settings(max_examples=30)
@given(st.floats(-1.3, 2.5), st.floats(-9, -2), st.floats(-4, 0), st.sampled_from(["poisson", "gaussian"]))
def test_calibration_meets_its_target(log_epsilon: float, log_delta: float, log_rate: float, kind: str) -> None:
    target, delta, make = 10.0**log_epsilon, 10.0**log_delta, EVENT_MAKERS[kind](10.0**log_rate)
    for name in accounting.accountants_for(make(1.0)):
        sigma = calibrate_noise_multiplier(target, delta, make, name)
        reached = accounting.epsilon(make(sigma), delta, name)
        assert target * (1 - 1e-6) <= reached <= target


def test_calibration_of_the_gaussian_is_the_analytic_one() -> None:
    sigma = calibrate_noise_multiplier(1.3, 1e-6, lambda sigma: Gaussian(sigma, 7), "gaussian")
    assert sigma == pytest.approx(accounting.analytic_noise_multiplier(1.3, 1e-6, 7), rel=2e-6)


def test_calibration_is_quick() -> None:
    start = time.perf_counter()
    calibrate_noise_multiplier(3.0, 1e-5, lambda sigma: PoissonSampledGaussian(0.004, sigma, 2345))
    assert time.perf_counter() - start < 0.5


def test_calibration_says_why_a_target_is_out_of_reach() -> None:
    # One order has a floor: with no divergence at all it finds log(1/(alpha delta))/(alpha-1) + log(1-1/alpha).
    few = RdpAccountant(orders=(16.0,))
    with pytest.raises(ArgumentError, match=r"target_epsilon=0\.1: even noise_multiplier=1e\+07 gives epsilon=.* 16"):
        calibrate_noise_multiplier(0.1, 1e-9, poisson_at, few)
    with pytest.raises(ArgumentError, match="check that make_event uses the multiplier"):
        calibrate_noise_multiplier(50.0, 1e-5, lambda sigma: POISSON)
    with pytest.raises(ArgumentError, match=r"even noise_multiplier=1e\+07 gives epsilon=inf"):
        calibrate_noise_multiplier(1.0, 1e-5, lambda sigma: NonPrivate("a baseline"))
    with pytest.raises(PrivacyError, match="without replacement"):
        calibrate_noise_multiplier(1.0, 1e-5, lambda sigma: FixedSizeSampledGaussian(10, 2, sigma, 1))
    with pytest.raises(ArgumentTypeError, match="make_event="):
        calibrate_noise_multiplier(1.0, 1e-5, 3.0)  # type: ignore[arg-type]


def test_calibration_stops_right_behind_a_jump() -> None:
    # Where the divergence falls below delta^2, RDP's epsilon goes from 0.6 to 0 at once.
    def make(sigma: float) -> PoissonSampledGaussian:
        return PoissonSampledGaussian(1e-4, sigma, 8)

    sigma = calibrate_noise_multiplier(0.5, 0.004, make)
    assert accounting.epsilon(make(sigma), 0.004) == 0.0
    assert accounting.epsilon(make(sigma * (1 - 1e-9)), 0.004) > 0.5


def poisson_at(sigma: float) -> PoissonSampledGaussian:
    return PoissonSampledGaussian(0.01, sigma, 100)
