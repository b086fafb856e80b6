"""zCDP and the classic calibrations: valid, looser than the exact ones, and never chosen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore import accounting
from dpcore.accounting import Composed, Gaussian, MatrixGaussian, PoissonSampledGaussian
from dpcore.accounting.zcdp import zcdp_epsilon
from dpcore.errors import ArgumentError, PrivacyError
from tests.refused import refused

SIGMAS = st.floats(-0.7, 2).map(lambda x: 10.0**x)
DELTAS = st.floats(-12, -1.5).map(lambda x: 10.0**x)


def test_formula() -> None:
    # rho = 1/2 and log(1/delta) = 8: 1/2 + 2 sqrt(4).
    assert accounting.epsilon(Gaussian(1.0), math.exp(-8), "zcdp") == pytest.approx(4.5, rel=1e-14)
    two = Composed((Gaussian(1.0), MatrixGaussian(2.0, 2.0, 7, "tree")))
    assert accounting.epsilon(two, 1e-5, "zcdp") == pytest.approx(zcdp_epsilon(1.0, 1e-5), rel=1e-14)


@given(SIGMAS, st.integers(1, 300), DELTAS)
def test_lies_above_the_exact_value(sigma: float, count: int, delta: float) -> None:
    event = Gaussian(sigma, count)
    loose = accounting.epsilon(event, delta, "zcdp")
    assert loose >= accounting.epsilon(event, delta, "gaussian")
    assert accounting.delta(event, loose, "zcdp") == pytest.approx(delta, rel=1e-8)


def test_a_large_delta_is_out_of_its_range() -> None:
    assert accounting.delta(Gaussian(1.0), 0.4, "zcdp") == 1.0


def test_is_for_comparison_only() -> None:
    for event in (Gaussian(1.0), PoissonSampledGaussian(1.0, 1.0, 3), PoissonSampledGaussian(0.1, 1.0, 3)):
        assert "zcdp" not in accounting.accountants_for(event)
    assert "zcdp" in accounting.available_accountants()
    with pytest.raises(PrivacyError, match="accountant='zcdp': does not cover the event Poisson"):
        accounting.epsilon(PoissonSampledGaussian(0.1, 1.0, 3), 1e-5, "zcdp")


@given(st.floats(-2, -0.001).map(lambda x: 10.0**x), DELTAS)
def test_classic_calibration_is_enough_noise_and_more_than_needed(epsilon: float, delta: float) -> None:
    sigma = accounting.classic_noise_multiplier(epsilon, delta)
    assert accounting.epsilon(Gaussian(sigma), delta, "gaussian") <= epsilon
    assert sigma >= accounting.analytic_noise_multiplier(epsilon, delta)


@given(st.floats(-2, 3).map(lambda x: 10.0**x), DELTAS)
def test_closed_form_is_enough_noise_and_more_than_needed(epsilon: float, delta: float) -> None:
    sigma = accounting.closed_form_noise_multiplier(epsilon, delta)
    assert accounting.epsilon(Gaussian(sigma), delta, "gaussian") <= epsilon
    assert accounting.analytic_noise_multiplier(epsilon, delta) <= sigma


def test_classic_formula_is_refused_where_it_is_wrong() -> None:
    with pytest.raises(ArgumentError, match=r"epsilon=1\.0: must be below 1 for the classic formula"):
        accounting.classic_noise_multiplier(1, 1e-5)
    # What it would say there is too little noise.
    assert accounting.epsilon(Gaussian(math.sqrt(2 * math.log(1.25e5)) / 20), 1e-5, "gaussian") > 20
    refused(ArgumentError, r"delta=0\.06: must be at most 0\.05", accounting.closed_form_noise_multiplier, 1.0, 0.06)
    for calibrate in (accounting.classic_noise_multiplier, accounting.closed_form_noise_multiplier):
        refused(ArgumentError, "epsilon=0", calibrate, 0, 1e-5)
        refused(ArgumentError, "delta=0", calibrate, 0.5, 0)
