"""The exact Gaussian accountant against 50-digit arithmetic."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mpmath")
import mpmath

from dpcore import accounting
from dpcore.accounting import Adjacency, Composed, Gaussian, MatrixGaussian
from dpcore.accounting.gaussian import analytic_noise_multiplier, gaussian_epsilon, log_delta
from dpcore.errors import ArgumentError
from tests.refused import refused

MUS = st.floats(-3, 2).map(lambda x: 10.0**x)
DELTAS = st.floats(-30, -0.5).map(lambda x: 10.0**x)


def true_log_delta(mu: float, epsilon: float) -> float:
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        value = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
        return float(mpmath.log(value))


@pytest.mark.parametrize("mu", [1e-3, 0.03, 0.5, 1.0, 4.0, 30.0, 200.0])
@pytest.mark.parametrize("width", [0.0, 1e-3, 0.1, 1.0, 3.0, 8.0])
def test_delta_has_its_digits_in_both_tails(mu: float, width: float) -> None:
    for epsilon in (mu * width, mu * mu / 2 + mu * width):
        assert log_delta(mu, epsilon) == pytest.approx(true_log_delta(mu, epsilon), rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("mu", [1e-9, 1e-3, 0.5, 30.0])
def test_no_accountant_states_less_than_the_exact_delta(mu: float) -> None:
    event = Gaussian(1 / mu)
    for epsilon in (0.0, mu, mu * mu / 2 + 6 * mu):
        exact = true_log_delta(1 / event.noise_multiplier, epsilon)
        for name in accounting.accountants_for(event):
            assert math.log(accounting.delta(event, epsilon, name)) >= exact


@given(st.integers(3, 12), st.floats(0, 1), st.floats(-200, -0.5))
def test_no_digit_lost_to_a_large_mu_makes_delta_too_small(power: int, rest: float, log: float) -> None:
    event = Gaussian(1e-9, max(1, round(10 ** (2 * (power + rest - 9)))))
    epsilon = accounting.epsilon(event, 10**log, "gaussian")
    with mpmath.workdps(80):
        mu = mpmath.sqrt(event.count) / mpmath.mpf(event.noise_multiplier)
        a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
        # Phi(b) by the first terms of its series: b is beyond -1e3.
        exact = mpmath.ncdf(a) - mpmath.exp(-a * a / 2) / (mpmath.sqrt(2 * mpmath.pi) * -b) * (1 - b**-2)
    assert exact <= 10**log
    assert accounting.delta(event, epsilon, "gaussian") >= exact


@given(MUS, DELTAS)
def test_epsilon_is_the_least_that_meets_delta(mu: float, delta: float) -> None:
    epsilon = gaussian_epsilon(mu, delta)
    assert log_delta(mu, epsilon) <= math.log(delta)
    if epsilon > 0:
        # The slope of log delta is at least about 1 in size wherever epsilon is large, so a hair less must fail.
        assert log_delta(mu, epsilon * (1 - 1e-7)) > math.log(delta)
    else:
        assert math.erf(mu / math.sqrt(8)) <= delta * (1 + 1e-12)


@given(st.floats(-3, 3).map(lambda x: 10.0**x), DELTAS, st.integers(1, 500))
def test_analytic_calibration_is_the_inverse(epsilon: float, delta: float, count: int) -> None:
    sigma = analytic_noise_multiplier(epsilon, delta, count)
    reached = accounting.epsilon(Gaussian(sigma, count), delta, "gaussian")
    assert reached <= epsilon * (1 + 1e-12)
    assert reached >= epsilon * (1 - 1e-6)


def test_matrix_mechanisms_compose_with_others_under_zero_out() -> None:
    matrix = MatrixGaussian(2.0, 3.0, 50, "tree(steps=50)")
    parts = Composed((matrix, Gaussian(1.0, 4, Adjacency.ZERO_OUT)))
    assert parts.adjacency is Adjacency.ZERO_OUT
    for name in ("gaussian", "rdp"):
        whole = accounting.epsilon(Gaussian(1 / math.hypot(1.5, 2.0)), 1e-5, name)
        assert accounting.epsilon(parts, 1e-5, name) == pytest.approx(whole, rel=1e-12)
    # The multiplier and the sensitivity in one unit: only their ratio counts.
    alone = accounting.delta(Gaussian(2.0 / 3.0), 1.0, "gaussian")
    assert accounting.delta(matrix, 1.0, "gaussian") == pytest.approx(alone, rel=1e-12)


def test_published_figure() -> None:
    # Adaptive optimizers, section 5.2: three epochs at delta = 1e-7 are printed as epsilon 149.1 with noise 0.134; the
    # unrounded noise is 0.1345.
    assert accounting.epsilon(Gaussian(0.1345, 3), 1e-7, "gaussian") == pytest.approx(149.1, abs=0.1)


def test_calibration_refuses_bad_targets() -> None:
    refused(ArgumentError, "epsilon=0", analytic_noise_multiplier, 0, 1e-5)
    refused(ArgumentError, r"epsilon=1e\+18: must be at most 1e17", analytic_noise_multiplier, 1e18, 1e-5)
    refused(ArgumentError, "delta=1", analytic_noise_multiplier, 1.0, 1)
    refused(ArgumentError, "count=0", analytic_noise_multiplier, 1.0, 1e-5, 0)
