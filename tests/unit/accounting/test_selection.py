"""The cost of private selection: published formulas, dp-accounting, and every winner of small mechanisms, exactly."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import logser

from dpcore import accounting
from dpcore.accounting import Composed, Event, Gaussian, PoissonSampledGaussian, PrivateSelection, selection
from dpcore.accounting.renyi import DEFAULT_ORDERS, event_rdp
from dpcore.accounting.run_law import any_of, continuation, each_of, mean_of, runs_at
from dpcore.accounting.selection import distortion
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from tests.refused import refused

Array = NDArray[np.float64]
RUN = PoissonSampledGaussian(0.02, 1.2, 300)
LAWS = [(1.0, 1.5), (1.0, 30.0), (0.0, 3.0), (-0.5, 30.0), (3.0, 3.0), (None, 0.5), (None, 3.0), (None, 8.0)]
ORDERS = np.array([1.05, 1.5, 3.0, 16.0])
EPSILONS = (0.0, 0.1, 1.0, 3.0)


def generating(shape: float | None, mean: float, x: Array) -> Array:
    """Return E x^K as the papers write it."""
    if shape is None:
        return np.exp(mean * (x - 1.0))
    g = continuation(shape, mean)
    if shape == 0.0:
        return np.log1p(-(1.0 - g) * x) / math.log(g)
    return ((1.0 - (1.0 - g) * x) ** -shape - 1.0) / (g**-shape - 1.0)


def winner(shape: float | None, mean: float, law: Array) -> Array:
    """Return the probability that no run is made, and of each result of being the best one, worst first."""
    below = np.concatenate([[0.0], np.cumsum(law)[:-1], [1.0]])
    return np.diff(generating(shape, mean, below), prepend=0.0)


def pairs(shape: float | None, mean: float, mu: float) -> Iterator[tuple[Array, Array]]:
    """Yield winners' laws on neighbours: a Gaussian mechanism's result in two to four cells, in any order of merit."""
    draws = np.random.default_rng(7)
    for _ in range(600):
        cells = int(draws.integers(2, 5))
        cuts = np.sort(draws.normal(mu / 2, 1.5 + mu, cells - 1))
        order = draws.permutation(cells)
        here, there = (np.diff(np.concatenate([[0.0], ndtr(cuts - at), [1.0]]))[order] for at in (0.0, mu))
        a, b = winner(shape, mean, here), winner(shape, mean, there)
        if min(a[1:].min(), b[1:].min()) > 1e-11:
            yield a[a > 0.0], b[a > 0.0]


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("shape", "mean"), LAWS)
def test_no_winner_is_told_apart_better_than_the_bounds_say(shape: float | None, mean: float, mu: float) -> None:
    event = PrivateSelection(Gaussian(1.0 / mu), mean, shape)
    deltas = [accounting.delta(event, epsilon, "selection") for epsilon in EPSILONS]
    divergences = event_rdp(event, ORDERS)
    seen = 0
    for a, b in pairs(shape, mean, mu):
        seen += 1
        for epsilon, delta in zip(EPSILONS, deltas, strict=True):
            assert np.maximum(a - math.exp(epsilon) * b, 0.0).sum() <= delta + 1e-12
        for order, bound in zip(ORDERS, divergences, strict=True):
            assert math.log((b * (a / b) ** order).sum()) / (order - 1.0) <= bound + 1e-9
    assert seen > 100


@pytest.mark.parametrize(("shape", "mean"), [law for law in LAWS if law[0] is not None])
def test_moments_are_theorem_2(shape: float, mean: float) -> None:
    event, g = PrivateSelection(RUN, mean, shape), continuation(shape, mean)
    every = np.array(DEFAULT_ORDERS)
    rdp = event_rdp(RUN, every)
    for order, found in zip(ORDERS, event_rdp(event, ORDERS), strict=True):
        own = float(event_rdp(RUN, np.array([order]))[0])
        terms = ((1 - 1 / u) * r + math.log(1 / g) / u for u, r in zip(every, rdp, strict=True))
        least = (1 + shape) * min(*terms, math.log(1 / g))
        assert found == pytest.approx(own + least + math.log(mean) / (order - 1), rel=1e-9)


def test_moments_are_theorem_6_and_the_event_of_no_run() -> None:
    for mean in (0.5, 8.0):
        for order, found in zip(ORDERS, event_rdp(PrivateSelection(RUN, mean, None), ORDERS), strict=True):
            own = float(event_rdp(RUN, np.array([order]))[0])
            delta = accounting.delta(RUN, math.log1p(1 / (order - 1)), "rdp")
            published = own + mean * delta + math.log(mean) / (order - 1)
            assert found == pytest.approx(np.logaddexp((order - 1) * published, -mean) / (order - 1), rel=1e-9)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 4.0])
def test_dp_accounting_says_the_same(shape: float) -> None:
    theirs = pytest.importorskip("dp_accounting.rdp.rdp_privacy_accountant")._compute_rdp_repeat_and_select
    orders = np.array(DEFAULT_ORDERS)
    found = event_rdp(PrivateSelection(Gaussian(2.0), 20.0, shape), orders)
    # It also takes the divergence of a larger order where that bound is less.
    found = np.minimum.accumulate(found[::-1])[::-1]
    assert found == pytest.approx(theirs(orders, orders / 8.0, 20.0, shape), rel=1e-9)


@pytest.mark.parametrize(("shape", "mean"), LAWS)
def test_the_law_of_the_number_of_runs(shape: float | None, mean: float) -> None:
    for d in (1e-12, 1e-3, 0.4, 1.0):
        assert any_of(shape, mean, d) == pytest.approx(1.0 - generating(shape, mean, np.array([1.0 - d]))[0], rel=1e-3)
        assert any_of(shape, mean, d) <= mean * d * (1 + 1e-12)
        assert each_of(shape, mean, min(any_of(shape, mean, d), 1 - 1e-12)) == pytest.approx(d, rel=1e-3)
    if shape is not None:
        assert mean_of(shape, continuation(shape, mean)) == pytest.approx(mean, rel=1e-9)
    if shape == 0.0:
        assert logser.mean(1.0 - continuation(0.0, mean)) == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize(("shape", "mean"), LAWS)
def test_draws_the_number_of_runs(shape: float | None, mean: float) -> None:
    circle, total = 0.5 * np.exp(2j * np.pi * np.arange(64) / 64), 0.0
    for k in range(4):  # Pr[K <= k], by the coefficients of the generating function
        total += float((generating(shape, mean, circle) * circle**-k).mean().real)
        if total > 1e-4:
            assert runs_at(shape, mean, total - 1e-6) <= k < runs_at(shape, mean, total + 1e-6)


def test_the_profile_is_tighter_than_the_moments_and_both_are_inverse_to_themselves() -> None:
    for shape in (0.0, 1.0, None):
        event = PrivateSelection(RUN, 20.0, shape)
        found = accounting.epsilon(event, 1e-5, "selection")
        assert accounting.epsilon(RUN, 1e-5) < found < accounting.epsilon(event, 1e-5, "rdp")
        assert accounting.delta(event, found, "selection") == pytest.approx(1e-5, rel=0.05)
        assert accounting.smallest_epsilon(event, 1e-5) == (found, "selection")
    assert found < 0.9 * (
        distortion(event) + accounting.epsilon(RUN, each_of(None, 20.0, 1e-5))
    )  # the largest ratio of all


def test_calibrates_the_noise_of_each_run() -> None:
    def make(sigma: float) -> Event:
        return PrivateSelection(Gaussian(sigma), 20.0)

    sigma = accounting.calibrate("noise_multiplier", 3.0, 1e-5, make)
    assert 2.99 < accounting.epsilon(make(sigma), 1e-5) <= 3.0
    assert accounting.epsilon(make(sigma).run, 1e-5) > 1.0  # type: ignore[attr-defined]  # 20 runs for less than three


def test_composes_with_other_releases_by_moments() -> None:
    event = PrivateSelection(RUN, 20.0)
    both = Composed((event, Gaussian(3.0)))
    assert accounting.accountants_for(event) == ("selection", "rdp")
    assert accounting.accountants_for(both) == ("rdp",)
    assert event_rdp(both, ORDERS) == pytest.approx(event_rdp(event, ORDERS) + event_rdp(Gaussian(3.0), ORDERS))
    assert Event.from_dict(both.to_dict()) == both
    assert event.adjacency == RUN.adjacency
    assert accounting.epsilon(PrivateSelection(Gaussian(0.0), 2.0), 1e-5) == math.inf


def test_refuses_laws_that_do_not_exist() -> None:
    refused(ArgumentError, "expected_runs=1.0: must be more than 1", PrivateSelection, RUN, 1.0)
    refused(ArgumentError, "expected_runs=0", PrivateSelection, RUN, 0.0, None)
    refused(ArgumentError, "expected_runs=50.0: .*less than .*shape=-0.999", PrivateSelection, RUN, 50.0, -0.999)
    refused(ArgumentError, "shape=-1.0: must be above -1", PrivateSelection, RUN, 2.0, -1.0)
    refused(ArgumentTypeError, "run=3: must be an event", PrivateSelection, 3, 2.0)
    refused(ArgumentError, "a selection of selections", PrivateSelection, Composed((PrivateSelection(RUN, 2.0),)), 2.0)
    with pytest.raises(PrivacyError, match="does not cover the event Composed; use accountant='rdp'"):
        accounting.epsilon(Composed((PrivateSelection(RUN, 2.0), PrivateSelection(RUN, 2.0))), 1e-5, "selection")


@pytest.mark.parametrize("mean", [3.0, 20.0, 5000.0])
def test_the_poisson_bound_is_an_upper_sum_without_warnings(mean: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never below the same integral on a grid eighty times as fine, and not much above it."""
    event = PrivateSelection(Gaussian(1.0), mean, None)
    for epsilon in (0.1, 3.0, 9.0):
        stated = selection._poisson_delta(event, epsilon, *selection._knots(event.run, epsilon))
        with monkeypatch.context() as patch:
            patch.setattr(selection, "_CUTS", 80 * selection._CUTS)
            fine = selection._poisson_delta(event, epsilon, *selection._knots(event.run, epsilon))
        assert fine <= stated <= 1.2 * fine
