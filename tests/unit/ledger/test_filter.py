"""The filter's arithmetic: against SciPy's optimizers, the definitions, and dp-accounting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from dpcore.accounting import Composed, Gaussian, NonPrivate, PoissonSampledGaussian
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.ledger.privacy_filter import DEFAULT_ORDER, PrivacyFilter, add, best_order
from tests.refused import refused

BUDGETS = [(0.1, 1e-6), (1.0, 1e-5), (3.0, 1e-5), (8.0, 1e-7), (30.0, 1e-5), (200.0, 1e-9)]


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_the_order_lets_a_gaussian_spend_most(epsilon: float, delta: float) -> None:
    def spent(log_above: float) -> float:
        """-mu^2/2 of the Gaussian whose divergence at this order converts to the budget, from the formula's paper."""
        order = 1.0 + math.exp(log_above)
        most = epsilon + (math.log(delta) - (order - 1) * math.log(1 - 1 / order) + math.log(order)) / (order - 1)
        return -most / order

    best = scipy.optimize.minimize_scalar(spent, bounds=(-6, 10), method="bounded", options={"xatol": 1e-9})
    order = best_order(epsilon, delta)
    assert 0.95 <= spent(math.log(order - 1)) / best.fun < 0.99
    assert order < 1 + math.exp(best.x)
    # What it leaves of the exact Gaussian: conversion at one order loses a little.
    exact = PrivacyFilter("gdp").limit(epsilon, delta) / 2
    assert 0.7 * exact < -best.fun < exact


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
@pytest.mark.parametrize("kind", ["rdp", "gdp"])
def test_the_limit_converts_to_the_budget(kind: str, epsilon: float, delta: float) -> None:
    chosen = PrivacyFilter.of(kind, None, (epsilon, delta))
    limit = chosen.limit(epsilon, delta)
    assert epsilon * (1 - 1e-9) < chosen.epsilon(limit, delta) <= epsilon
    assert chosen.epsilon(limit * 1.0001, delta) > epsilon
    assert chosen.epsilon(0.0, delta) == 0.0


def test_gdp_is_the_definition() -> None:
    chosen = PrivacyFilter("gdp")
    mu, epsilon = math.sqrt(chosen.limit(2.0, 1e-5)), 2.0
    phi = scipy.stats.norm.cdf
    assert phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu) == pytest.approx(1e-5, rel=1e-8)
    event = Composed((Gaussian(4.0, 3), Gaussian(2.0)))
    assert chosen.charge(event) == pytest.approx(3 / 16 + 1 / 4)
    assert chosen.charge(PoissonSampledGaussian(1.0, 5.0, 10)) == pytest.approx(10 / 25)
    assert chosen.charge(NonPrivate("x")) == math.inf
    with pytest.raises(PrivacyError, match="does not cover secretly sampled batches"):
        chosen.charge(PoissonSampledGaussian(0.5, 5.0, 10))


@pytest.mark.parametrize("order", [2.0, 7.5, 8.0, 32.0])
def test_charges_are_dp_accountings(order: float) -> None:
    dp_accounting = pytest.importorskip("dp_accounting")
    chosen = PrivacyFilter("rdp", order)
    for rate, sigma, steps in ((0.01, 1.0, 1000), (0.1, 2.0, 37), (0.004, 0.7, 5000)):
        oracle = dp_accounting.rdp.RdpAccountant([order])
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        oracle.compose(dp_accounting.SelfComposedDpEvent(event, steps))
        charge = chosen.charge(PoissonSampledGaussian(rate, sigma, steps))
        # At fractional orders dp-accounting's series is an upper bound; whole orders agree.
        assert charge <= oracle._rdp[0] * (1 + 1e-9)
        if order.is_integer():
            assert charge == pytest.approx(oracle._rdp[0], rel=1e-9)
            assert chosen.epsilon(charge, 1e-5) == pytest.approx(oracle.get_epsilon(1e-5), rel=1e-9)


def test_runs_add_up() -> None:
    chosen = PrivacyFilter()
    events = [PoissonSampledGaussian(0.01, 1.0, 10), Gaussian(3.0, 2), PoissonSampledGaussian(0.02, 2.0, 5)]
    assert add(map(chosen.charge, events)) == pytest.approx(chosen.charge(Composed(tuple(events))), rel=1e-12)
    assert (add([]), add([1.0, math.inf]), add([0.1] * 10)) == (0.0, math.inf, 1.0)


@given(st.floats(1e-9, 1e4), st.sampled_from([1e-9, 1e-5, 1e-2]), st.sampled_from(["rdp", "gdp"]))
def test_the_odometer_costs_more_than_a_limit_at_the_sum(total: float, delta: float, kind: str) -> None:
    chosen = PrivacyFilter(kind)
    assert chosen.odometer(total, delta) >= chosen.epsilon(total, delta)
    # And no more than twice the sum at a share of delta.
    share = 1 / (3 * (2 + 2 * abs(math.log2(total))) ** 2)
    assert chosen.odometer(total, delta) <= chosen.epsilon(2 * total, delta * share) + 1e-12
    assert chosen.odometer(total * 1.5, delta) >= chosen.odometer(total, delta) or total < 1


def test_the_odometers_shares_add_up_to_one_at_most() -> None:
    asked: list[tuple[float, float]] = []

    class Asked(PrivacyFilter):
        def epsilon(self, total: float, delta: float) -> float:
            asked.append((total, delta))
            return 0.0

    chosen = Asked()
    for j in range(-400, 401):
        chosen.odometer(2.0 ** (j / 2) * (1 - 1e-12), 1.0)
    limits, shares = np.array(asked).T
    assert limits == pytest.approx(2.0 ** (np.arange(-400, 401) / 2))
    assert 0.99 < shares.sum() <= 1
    assert chosen.odometer(math.inf, 1e-5) == math.inf


def test_an_odometer_holds_where_the_plain_sum_does_not() -> None:
    """Somebody stops when the loss looks large: the plain sum's epsilon is then false more often than delta."""
    rng = np.random.default_rng(5)
    chosen, delta, runs, steps, mu = PrivacyFilter("gdp"), 0.01, 20_000, 64, 0.5
    # The privacy loss of each step under the first data set, N(mu^2/2, mu^2), and the sum of charges so far.
    losses = np.cumsum(rng.normal(mu**2 / 2, mu, (runs, steps)), axis=1)
    sums = mu**2 * np.arange(1, steps + 1)
    stated = np.array([chosen.odometer(total, delta) for total in sums])
    plain = np.array([chosen.epsilon(total, delta) for total in sums])

    def failure(epsilons: np.ndarray, late: bool) -> float:
        """P(S) - exp(epsilon) Q(S), for S: the loss passed the epsilon that the ledger stated just then."""
        gaps = losses - epsilons
        passed = gaps.argmax(axis=1) if late else (gaps > 0.5).argmax(axis=1)
        gap = gaps[np.arange(runs), passed]
        return float(np.maximum(0.0, -np.expm1(-gap)).mean())

    for late in (False, True):
        assert failure(plain, late) > 1.3 * delta
        assert failure(stated, late) < delta


def test_refusals() -> None:
    """And the default: for sampled steps with little noise, the order that is best for a Gaussian is behind a cliff."""
    refused(ArgumentError, "is too small for a ledger at delta=1e-09", best_order, 1e-6, 1e-9)
    assert PrivacyFilter("gdp").limit(1e-6, 1e-9) > 0
    with pytest.raises(ArgumentError, match=r"order=1\.2: leaves nothing"):
        PrivacyFilter("rdp", 1.2).limit(1.0, 1e-5)
    assert abs(best_order(3.0, 1e-5) - DEFAULT_ORDER) < 1
    chosen = PrivacyFilter.of("rdp", None, (3.0, 1e-5))
    for plan in ((0.001, 0.7, 20_000), (0.01, 1.0, 2000), (0.02, 1.0, 400)):
        assert chosen.charge(PoissonSampledGaussian(*plan)) <= chosen.limit(3.0, 1e-5)
