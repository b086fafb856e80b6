"""The RDP accountant against dp-accounting, against quadrature in 30 digits, and against its own properties."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mpmath")
pytest.importorskip("dp_accounting")
import mpmath
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant as reference

from dpcore import accounting
from dpcore.accounting import Event, Gaussian, PoissonSampledGaussian
from dpcore.accounting.renyi import (
    _trapezoid,
    _window,
    delta_from_rdp,
    epsilon_from_rdp,
    event_rdp,
    log_moments_exact,
    log_moments_integer,
)
from tests.depth import chosen


def epsilon_of(event: Event, delta: float) -> float:
    return accounting.epsilon(event, delta, "rdp")


def delta_of(event: Event, epsilon: float) -> float:
    return accounting.delta(event, epsilon, "rdp")


REFERENCE_ORDERS = tuple(reference.DEFAULT_RDP_ORDERS)
# dp-accounting bounds fractional orders by a series, which is looser; both compute whole orders exactly.
WHOLE = np.array([order for order in REFERENCE_ORDERS if order == math.floor(order)], float)
RATES = st.floats(-4, -0.01).map(lambda x: 10.0**x)
SIGMAS = st.floats(-0.5, 1.5).map(lambda x: 10.0**x)
STEPS = st.integers(1, 100_000)
DELTAS = st.floats(-10, -2).map(lambda x: 10.0**x)


def reference_accountant(event: PoissonSampledGaussian, orders: Sequence[float]) -> reference.RdpAccountant:
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of every order that it leaves out
    step = dp_event.PoissonSampledDpEvent(event.sample_rate, dp_event.GaussianDpEvent(event.noise_multiplier))
    return reference.RdpAccountant(orders).compose(step, event.steps)


def random_settings(count: int) -> list[tuple[PoissonSampledGaussian, float]]:
    rng = np.random.default_rng(20)
    settings = []
    for number in range(count):
        q = 1.0 if number % 25 == 0 else 10 ** rng.uniform(-4, 0)
        sigma, steps = 0.3 * 100 ** rng.uniform(), int(10 ** rng.uniform(0, 5))
        settings.append((PoissonSampledGaussian(q, sigma, steps), 10 ** rng.uniform(-10, -2)))
    return settings


def test_random_settings_agree_with_dp_accounting() -> None:
    for event, delta in random_settings(chosen(60, 2000)):
        ours = epsilon_from_rdp(WHOLE, event_rdp(event, WHOLE), delta)
        theirs = reference_accountant(event, WHOLE.tolist()).get_epsilon(delta)
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12), (event, delta)
        # The library's own orders, and sums instead of bounds on them, only ever help.
        theirs = reference_accountant(event, REFERENCE_ORDERS).get_epsilon(delta)
        assert epsilon_of(event, delta) <= theirs * (1 + 1e-9), (event, delta)


def true_log_moment(q: float, sigma: float, alpha: float, *, swapped: bool = False) -> float:
    """log A by its definition, in 30 digits; `swapped` is the other direction, E_P[(Q/P)^alpha] with P the mixture."""
    with mpmath.workdps(30):
        q_, s, a = mpmath.mpf(q), mpmath.mpf(sigma), mpmath.mpf(alpha)

        def integrand(z: mpmath.mpf) -> mpmath.mpf:
            ratio = 1 - q_ + q_ * mpmath.exp((2 * z - 1) / (2 * s * s))
            return mpmath.npdf(z, 0, s) * ratio ** (1 - a if swapped else a)

        split = s * s * mpmath.log(1 / q_ - 1) + mpmath.mpf(1) / 2
        marks = [-20 * s, 0, 1, a, a + 20 * s, *range(2, int(a) + 1), split - 3 * s * s, split, split + 3 * s * s]
        inside = sorted({mark for mark in marks if -20 * s <= mark <= a + 20 * s})
        return float(mpmath.log(mpmath.quad(integrand, inside)))


CASES = [
    (0.01, 1.1, 9.8), (1e-4, 30.0, 1.1), (0.3, 0.3, 1.1), (0.9, 0.05, 1.5), (1e-4, 0.1, 2.5), (0.5, 3.0, 10.9),
    (0.999, 1.0, 1.01), (0.2, 100.0, 3.3), (0.01, 0.19, 10.9), (1 - 1e-9, 0.1, 1.5), (1e-9, 0.15, 1.1),
    (0.5, 0.01, 3.3),
]  # fmt: skip


@pytest.mark.parametrize(("q", "sigma", "alpha"), CASES)
def test_quadrature_is_exact_at_fractional_orders_and_removing_the_worse_direction(
    q: float, sigma: float, alpha: float
) -> None:
    exact = true_log_moment(q, sigma, alpha)
    assert log_moments_exact(q, sigma, np.array([alpha]))[0] == pytest.approx(exact, rel=1e-12)
    assert true_log_moment(q, sigma, alpha, swapped=True) <= exact


@given(RATES, st.floats(-3, 4).map(lambda x: 10.0**x), st.lists(st.integers(2, 32), min_size=1, max_size=5))
def test_quadrature_and_binomial_sum_agree_at_integer_orders(q: float, sigma: float, orders: list[int]) -> None:
    by_sum = log_moments_integer(q, sigma, tuple(orders))
    np.testing.assert_allclose(log_moments_exact(q, sigma, np.array(orders, float)), by_sum, rtol=1e-11)


@given(RATES, st.sampled_from([1.0 + x / 8 for x in range(1, 80)]))
def test_both_quadratures_agree_where_one_hands_over_to_the_other(q: float, alpha: float) -> None:
    order = np.array([alpha])
    np.testing.assert_allclose(_window(q, 0.2, order), _trapezoid(q, 0.2, order), rtol=1e-12, atol=1e-12)


@given(RATES, SIGMAS, st.floats(33, 300))
def test_chord_above_order_32_is_an_upper_bound_and_close(q: float, sigma: float, alpha: float) -> None:
    chord = log_moments_exact(q, sigma, np.array([alpha]))[0]
    below, above = log_moments_integer(q, sigma, (math.floor(alpha), math.floor(alpha) + 1))
    assert below <= chord <= above
    if sigma >= 0.5:
        exact = np.logaddexp(0.0, _trapezoid(q, sigma, np.array([alpha]))[0])
        assert chord >= exact * (1 - 1e-10)


@given(RATES, SIGMAS, STEPS, DELTAS, st.floats(1.0001, 3))
def test_epsilon_moves_the_right_way(q: float, sigma: float, steps: int, delta: float, more: float) -> None:
    def epsilon(q: float = q, sigma: float = sigma, steps: int = steps, delta: float = delta) -> float:
        return epsilon_of(PoissonSampledGaussian(q, sigma, steps), delta)

    here = epsilon() * (1 + 1e-12)
    assert epsilon(sigma=sigma * more) <= here
    assert epsilon(q=q / more) <= here
    assert epsilon(steps=math.floor(steps / more)) <= here
    assert epsilon(delta=min(0.5, delta * more)) <= here
    # Sampling never costs: at most what the same steps cost with everyone in them.
    assert here / (1 + 1e-12) <= epsilon_of(Gaussian(sigma, steps), delta) * (1 + 1e-12)


@given(RATES, SIGMAS, STEPS, DELTAS)
def test_delta_undoes_epsilon(q: float, sigma: float, steps: int, delta: float) -> None:
    event = PoissonSampledGaussian(q, sigma, steps)
    epsilon = epsilon_of(event, delta)
    again = delta_of(event, epsilon)
    assert again <= delta * (1 + 1e-6)
    if epsilon > 0:
        # log delta moves by (order - 1) times the rounding of epsilon.
        assert again == pytest.approx(delta, rel=1e-6)
        assert epsilon_of(event, again) == pytest.approx(epsilon, rel=1e-9)


@given(st.floats(1.01, 100), st.floats(0, 20), st.floats(0, 20))
def test_conversion_bounds_the_hockey_stick_of_a_gaussian(alpha: float, mu_squared: float, epsilon: float) -> None:
    mu = math.sqrt(mu_squared + 1e-6)
    bound = delta_from_rdp(np.array([alpha]), np.array([alpha * mu * mu / 2]), epsilon)
    truth = accounting.delta(Gaussian(1 / mu), epsilon, "gaussian")
    assert truth <= bound * (1 + 1e-9)


def test_conversion_takes_the_best_order_and_is_never_negative() -> None:
    orders = np.array([2.0, 8.0, 32.0])
    epsilon = epsilon_from_rdp(orders, 0.05 * orders, 1e-5)
    assert epsilon == pytest.approx(0.4 + math.log(7 / 8) - math.log(8e-5) / 7)
    assert epsilon_from_rdp(orders, np.zeros(3), 1e-5) == 0.0
    assert epsilon_from_rdp(orders, np.full(3, 1e-3), 0.5) == 0.0
    assert epsilon_from_rdp(orders, np.full(3, np.inf), 0.5) == math.inf
