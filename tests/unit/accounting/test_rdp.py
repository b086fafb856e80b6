"""Renyi DP of every kind of step, of compositions and of long schedules, against dp-accounting and mpmath."""

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mpmath")
pytest.importorskip("dp_accounting")
import mpmath
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.rdp import rdp_privacy_accountant as reference

from dpcore import accounting
from dpcore.accounting import (
    Adjacency,
    Composed,
    Event,
    Gaussian,
    MatrixGaussian,
    NonPrivate,
    PoissonSampledGaussian,
    renyi,
)
from dpcore.accounting.phases import phases
from dpcore.accounting.renyi import (
    DEFAULT_ORDERS,
    _log_bounds,
    _log_even_moments,
    _trapezoid,
    _window,
    epsilon_from_rdp,
    event_rdp,
    log_delta_from_rdp,
    log_moments_exact,
    log_moments_integer,
    log_moments_without_replacement,
)
from dpcore.ledger.privacy_filter import PrivacyFilter
from tests.depth import chosen

Cyclic, FixedSize = accounting.CyclicPoissonSampledGaussian, accounting.FixedSizeSampledGaussian
Poisson, Truncated = accounting.PoissonSampledGaussian, accounting.TruncatedPoissonSampledGaussian

logging.getLogger("absl").setLevel(logging.ERROR)  # dp-accounting warns of every order that it leaves out
ORDERS = tuple(reference.DEFAULT_RDP_ORDERS)
# dp-accounting bounds fractional orders of Poisson sampling by a series, which is looser.
WHOLE = np.array([order for order in ORDERS if order == math.floor(order)], float)


RELATIONS = {None: "ADD_OR_REMOVE_ONE", Adjacency.ADD_REMOVE: "ADD_OR_REMOVE_ONE",
             Adjacency.ZERO_OUT: "REPLACE_SPECIAL", Adjacency.REPLACE_ONE: "REPLACE_ONE"}  # fmt: skip


def in_their_terms(event: Event) -> dp_event.DpEvent:
    if isinstance(event, Composed):
        return dp_event.ComposedDpEvent([in_their_terms(part) for part in event.events])
    if isinstance(event, accounting.SelfComposed):
        repeated = in_their_terms(event.repeated)
        return dp_event.SelfComposedDpEvent(repeated, event.count) if event.count else dp_event.NoOpDpEvent()
    if isinstance(event, NonPrivate):
        return dp_event.NonPrivateDpEvent()
    if isinstance(event, MatrixGaussian):  # the one Gaussian mechanism that it is
        return dp_event.GaussianDpEvent(1.0 / event.mu)
    if isinstance(event, Cyclic):  # the steps that one example may enter
        event = Poisson(event.sample_rate, event.noise_multiplier / event.sensitivity, event.participations)
    step: dp_event.DpEvent = dp_event.GaussianDpEvent(event.noise_multiplier)
    if isinstance(event, Gaussian):
        return dp_event.SelfComposedDpEvent(step, event.count)
    if event.steps == 0:
        return dp_event.NoOpDpEvent()
    if isinstance(event, Poisson):
        step = dp_event.PoissonSampledDpEvent(event.sample_rate, step)
    elif isinstance(event, Truncated):
        cut = event.dataset_size, event.sample_rate, event.max_batch_size
        step = dp_event.TruncatedSubsampledGaussianDpEvent(*cut, event.noise_multiplier)
    else:
        step = dp_event.SampledWithoutReplacementDpEvent(event.dataset_size, event.batch_size, step)
    return dp_event.SelfComposedDpEvent(step, event.steps)


def reference_accountant(event: Event, orders: Sequence[float] = ORDERS) -> reference.RdpAccountant:
    relation = NeighboringRelation[RELATIONS[event.adjacency]]
    return reference.RdpAccountant(orders, relation).compose(in_their_terms(event))


def agree(event: Event, delta: float = 1e-5, atol: float = 0.0) -> None:
    theirs, ours = reference_accountant(event, WHOLE.tolist()), event_rdp(event, WHOLE)
    np.testing.assert_allclose(ours, theirs._rdp, rtol=1e-9, atol=atol)
    assert epsilon_from_rdp(WHOLE, ours, delta) == pytest.approx(theirs.get_epsilon(delta), rel=1e-9)
    # The library's own orders, and sums instead of bounds on them, only ever help.
    theirs = reference_accountant(event)
    assert accounting.epsilon(event, delta, "rdp") <= theirs.get_epsilon(delta) * (1 + 1e-9)


def fixed_sizes(count: int) -> list[FixedSize]:
    rng, found = np.random.default_rng(7), []
    while len(found) < count:
        n = int(10 ** rng.uniform(1, 6))
        batch = max(1, min(n, round(n * 10 ** rng.uniform(-4, 0))))
        sigma = 0.3 * 100 ** rng.uniform()
        # dp-accounting takes differences of moments close to 1 and loses its digits where many matter; what is right
        # there is tested below against mpmath.
        if batch / n * sigma < 0.05 or sigma < 2.0:
            found.append(FixedSize(n, batch, sigma, int(10 ** rng.uniform(0, 5))))
    return found


@pytest.mark.parametrize("event", fixed_sizes(chosen(5, 100)), ids=str)
def test_without_replacement_agrees_with_dp_accounting(event: FixedSize) -> None:
    agree(event)


def true_even_moment(sigma: float, power: int) -> float:
    """log E[(r - 1)^l] by the alternating sum, in as many digits as it takes."""
    with mpmath.workdps(60 + 4 * power):
        s = mpmath.mpf(sigma)
        terms = (
            mpmath.binomial(power, k) * (-1) ** (power - k) * mpmath.exp((k * k - k) / (2 * s * s))
            for k in range(power + 1)
        )
        return float(mpmath.log(mpmath.fsum(terms)))


@pytest.mark.parametrize("sigma", [0.85, 1.0, 2.0, 7.0, 30.0, 1000.0])
@pytest.mark.parametrize("power", [2, 4, 10, 64, 256])
def test_even_moments_keep_their_digits(sigma: float, power: int) -> None:
    exact = true_even_moment(sigma, power)
    assert _log_even_moments(sigma)[power // 2 - 1] == pytest.approx(exact, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("sigma", [0.3, 0.5, 0.8493])
def test_little_noise_needs_no_even_moments(sigma: float) -> None:
    moments = [true_even_moment(sigma, power) for power in range(2, 34, 2)]
    with_them = [math.log(4) + 0.5 * (moments[j // 2 - 1] + moments[(j + 1) // 2 - 1]) for j in range(3, 33)]
    simple = _log_bounds(sigma, 32)[1:]
    assert np.all(simple <= np.array(with_them) + 1e-12)


def test_without_replacement_where_differences_lose_their_digits() -> None:
    q, sigma, alpha = 0.9, 20.0, 64
    with mpmath.workdps(60):
        total = mpmath.mpf(1)
        for j in range(2, alpha + 1):
            plain = 2 * mpmath.exp(mpmath.mpf(j * j - j) / (2 * sigma**2))
            if j == 2:
                bound = min(4 * (mpmath.exp(mpmath.mpf(1) / sigma**2) - 1), plain)
            else:
                low, high = true_even_moment(sigma, 2 * (j // 2)), true_even_moment(sigma, 2 * ((j + 1) // 2))
                bound = min(4 * mpmath.exp((low + high) / 2), plain)
            total += mpmath.mpf(q) ** j * mpmath.binomial(alpha, j) * bound
        exact = float(mpmath.log(total))
    assert log_moments_without_replacement(q, sigma, np.array([64.0]))[0] == pytest.approx(exact, rel=1e-10)


@given(st.floats(-4, -0.05), st.floats(-0.5, 2), st.floats(1.001, 300))
def test_without_replacement_costs_at_least_what_poisson_does(log_rate: float, log_sigma: float, order: float) -> None:
    """Replace-one with sensitivity 2C: twice the multiplier is that of one example's own vector.

    Exchanging an example for one that adds nothing is a special case, and what it costs at least is what the Gaussian
    costs with the chance to be in: the mixture (1-q) N(0) + q N(1) beside N(0), that of Poisson sampling.
    """
    q, sigma = 10.0**log_rate, 10.0**log_sigma
    bound = log_moments_without_replacement(q, sigma, np.array([order]))[0]
    assert bound >= log_moments_exact(q, 2.0 * sigma, np.array([min(order, 32.0)]))[0] * (1 - 1e-9) or order > 32.0


MIXED: dict[str, Event] = {
    "poisson and gaussian": Composed((Poisson(0.01, 1.1, 500), Gaussian(3.0, 5, Adjacency.ZERO_OUT))),
    "nested": Composed((Composed((Poisson(0.02, 0.9, 50),)), Poisson(0.003, 2.0, 400))),
    "repeated": accounting.SelfComposed(Composed((Poisson(0.02, 1.5, 50), Gaussian(4.0))), 7),
    "repeated never": Composed((accounting.SelfComposed(NonPrivate("never"), 0), Gaussian(2.0))),
    "cyclic": Cyclic(0.1, 8, 1.3, 1.1, 1001),
    "cyclic and matrix": Composed((Cyclic(0.1, 8, 1.3, 1.1, 100), MatrixGaussian(2.0, 1.5, 100, "tree"))),
    "everyone in": Poisson(1.0, 4.0, 10),
    "no steps": Composed((Poisson(0.1, 1.0, 0), Gaussian(2.0))),
    "fixed sizes": Composed(
        (FixedSize(1000, 20, 0.7, 30), FixedSize(1000, 50, 1.4, 5), Gaussian(3.0, 2, Adjacency.REPLACE_ONE))
    ),
    "all of them": accounting.SelfComposed(FixedSize(10, 10, 2.0, 3), 2),
}


@pytest.mark.parametrize("name", sorted(MIXED))
def test_compositions_agree_with_dp_accounting(name: str) -> None:
    agree(MIXED[name])


def test_a_mixture_lies_between_its_parts() -> None:
    orders = np.array([1.1, 1.5, 2.0, 7.0, 16.0])
    event = Truncated(1000, 0.01, 12, 1.0, 1, Adjacency.ADD_REMOVE)
    (step, _), *_ = phases(event).steps  # type: ignore[union-attr]
    whole = (orders - 1) * event_rdp(event, orders)
    parts = [
        (orders - 1) * event_rdp(Poisson(q, sigma, 1), orders)
        for _, q, sigma in step.components  # type: ignore[union-attr]
    ]
    weights = [weight for weight, _, _ in step.components]  # type: ignore[union-attr]
    assert 0.0 < sum(weights) <= 1.0 + 1e-12
    expected = np.log(1 - sum(weights) + sum(w * np.exp(m) for w, m in zip(weights, parts, strict=True)))
    np.testing.assert_allclose(whole, expected, rtol=1e-9)
    assert np.all(np.minimum(*parts) <= whole + 1e-12)
    assert np.all(whole <= np.maximum(*parts) + 1e-12)


def test_truncation_that_never_happens_costs_nothing() -> None:
    plain = Poisson(0.01, 1.0, 50)
    for adjacency in (Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE):
        never = Truncated(1000, 0.01, 1000, 1.0, 50, adjacency)
        hardly = Truncated(1000, 0.01, 400, 1.0, 50, adjacency)
        often = Truncated(1000, 0.01, 10, 1.0, 50, adjacency)
        base = accounting.epsilon(plain, 1e-5, "rdp")
        assert accounting.epsilon(never, 1e-5, "rdp") == base
        assert accounting.epsilon(hardly, 1e-5, "rdp") == pytest.approx(base, rel=1e-3)
        assert accounting.epsilon(often, 1e-5, "rdp") > base


ALL = np.array(DEFAULT_ORDERS)


def schedule(count: int, seed: int = 0) -> Composed:
    rng = np.random.default_rng(seed)
    rates, sigmas = 10 ** rng.uniform(-4, -1, count), rng.uniform(0.5, 3, count)
    return Composed(tuple(Poisson(float(q), float(s), 2) for q, s in zip(rates, sigmas, strict=True)))


@settings(max_examples=chosen(6, 60))
@given(st.integers(9, 20), st.integers(0, 50), st.floats(-9, -1.5), st.floats(0, 3))
def test_schedules_find_the_best_of_all_orders(count: int, seed: int, log_delta: float, mu: float) -> None:
    event = Composed((*schedule(count, seed).events, Gaussian(1.0 / mu)) if mu > 0.1 else schedule(count, seed).events)
    delta, rdp = 10.0**log_delta, event_rdp(event, ALL)
    epsilon = epsilon_from_rdp(ALL, rdp, delta)
    assert accounting.epsilon(event, delta, "rdp") == pytest.approx(epsilon, rel=1e-10, abs=1e-12)
    for at in (0.0, 0.5 * epsilon, epsilon, 2.0 * epsilon):
        theirs = math.exp(min(0.0, log_delta_from_rdp(ALL, rdp, at)))
        assert accounting.delta(event, at, "rdp") == pytest.approx(theirs, rel=1e-8, abs=1e-300)


def test_many_phases() -> None:
    event = schedule(300)
    few = ALL[80:120:8]
    assert accounting.epsilon(event, 1e-6, "rdp") <= epsilon_from_rdp(few, event_rdp(event, few), 1e-6)
    mixed = Composed((*event.events[:20], Truncated(1000, 0.01, 12, 1.0, 3), Gaussian(2.0, 3), NonPrivate("x")))
    assert accounting.epsilon(mixed, 1e-6, "rdp") == math.inf
    assert accounting.delta(mixed, 3.0, "rdp") == 1.0


def test_a_schedule_of_all_kinds_of_steps_is_the_sum_of_its_parts() -> None:
    truncated = Truncated(1000, 0.01, 12, 1.0, 3)
    event = Composed((*schedule(12).events, truncated, Gaussian(2.0, 3)))
    sizes = Composed(tuple(FixedSize(1000, 10 + i, 0.5 + i / 10, 2) for i in range(12)))
    for many in (event, sizes):
        expected = epsilon_from_rdp(ALL, event_rdp(many, ALL), 1e-6)
        assert accounting.epsilon(many, 1e-6, "rdp") == pytest.approx(expected, rel=1e-10)


EVENTS_AT: dict[str, Callable[[float, int], Event]] = {
    "poisson": lambda sigma, steps: Poisson(0.01, sigma, steps),
    "truncated": lambda sigma, steps: Truncated(100, 0.1, 12, sigma, steps),
    "fixed size": lambda sigma, steps: FixedSize(100, 10, sigma, steps),
    "cyclic": lambda sigma, steps: Cyclic(0.1, 3, sigma, 1.0, steps), "gaussian": Gaussian,
    "matrix": lambda sigma, steps: MatrixGaussian(sigma, 1.5, steps, "tree"),
    "repeated": lambda sigma, steps: accounting.SelfComposed(Poisson(0.1, sigma, 1), steps),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(EVENTS_AT))
def test_ends_of_every_event(name: str) -> None:
    make = EVENTS_AT[name]
    for accountant in (*accounting.accountants_for(make(1.0, 3)), None):
        for endless in (make(0.0, 3), NonPrivate("a baseline"), Composed((make(1.0, 3), NonPrivate("a baseline")))):
            assert accounting.epsilon(endless, 1e-5, accountant) == math.inf
            assert accounting.delta(endless, 5.0, accountant) == 1.0
        for nothing in (make(0.0, 0), make(1.0, 0), Composed(())):
            assert accounting.epsilon(nothing, 1e-5, accountant) == 0.0
            assert accounting.delta(nothing, 0.0, accountant) == 0.0
        assert 0.0 <= accounting.epsilon(make(1e6, 1), 0.5, accountant) <= 1e-3


# The RDP accountant against dp-accounting, against quadrature in 30 digits, and against its own properties.


def epsilon_of(event: Event, delta: float) -> float:
    return accounting.epsilon(event, delta, "rdp")


RATES = st.floats(-4, -0.01).map(lambda x: 10.0**x)
SIGMAS = st.floats(-0.5, 1.5).map(lambda x: 10.0**x)
STEPS = st.integers(1, 100_000)
DELTAS = st.floats(-10, -2).map(lambda x: 10.0**x)


def random_settings(count: int) -> list[tuple[PoissonSampledGaussian, float]]:
    rng = np.random.default_rng(20)
    settings = []
    for number in range(count):
        q = 1.0 if number % 25 == 0 else 10 ** rng.uniform(-4, 0)
        sigma, steps = 0.3 * 100 ** rng.uniform(), int(10 ** rng.uniform(0, 5))
        settings.append((PoissonSampledGaussian(q, sigma, steps), 10 ** rng.uniform(-10, -2)))
    return settings


def test_random_settings_agree_with_dp_accounting() -> None:
    for event, delta in random_settings(chosen(26, 2000)):
        agree(event, delta, atol=1e-13)  # where nearly nothing is lost, dp-accounting has fewer digits


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
    if (q, sigma, alpha) in chosen(CASES[::6], CASES):
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


@given(RATES, SIGMAS, STEPS, DELTAS)
def test_delta_undoes_epsilon(q: float, sigma: float, steps: int, delta: float) -> None:
    event = PoissonSampledGaussian(q, sigma, steps)
    epsilon = epsilon_of(event, delta)
    again = accounting.delta(event, epsilon, "rdp")
    assert again <= delta * (1 + 1e-6)
    if epsilon > 0:
        # log delta moves by (order - 1) times the rounding of epsilon.
        assert again == pytest.approx(delta, rel=1e-6)
        assert epsilon_of(event, again) == pytest.approx(epsilon, rel=1e-9)


@given(st.floats(1.01, 100), st.floats(0, 20), st.floats(0, 20))
def test_conversion_bounds_the_hockey_stick_of_a_gaussian(alpha: float, mu_squared: float, epsilon: float) -> None:
    mu = math.sqrt(mu_squared + 1e-6)
    bound = math.exp(min(0.0, log_delta_from_rdp(np.array([alpha]), np.array([alpha * mu * mu / 2]), epsilon)))
    truth = accounting.delta(Gaussian(1 / mu), epsilon, "gaussian")
    assert truth <= bound * (1 + 1e-9)


def test_conversion_takes_the_best_order_and_is_never_negative() -> None:
    orders = np.array([2.0, 8.0, 32.0])
    epsilon = epsilon_from_rdp(orders, 0.05 * orders, 1e-5)
    assert epsilon == pytest.approx(0.4 + math.log(7 / 8) - math.log(8e-5) / 7)
    assert epsilon_from_rdp(orders, np.zeros(3), 1e-5) == 0.0
    assert epsilon_from_rdp(orders, np.full(3, 1e-3), 0.5) == 0.0
    assert epsilon_from_rdp(orders, np.full(3, np.inf), 0.5) == math.inf


def test_an_order_that_cannot_be_computed_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = np.array([2.0, 8.0])
    assert epsilon_from_rdp(orders, np.full(2, np.nan), 1e-5) == math.inf
    assert epsilon_from_rdp(orders, np.array([1.0, np.nan]), 1e-5) == epsilon_from_rdp(orders[:1], np.ones(1), 1e-5)
    assert log_delta_from_rdp(orders, np.full(2, np.nan), 1.0) == math.inf
    monkeypatch.setattr(renyi, "poisson_rdp", lambda _q, _sigma, at: np.full_like(at, np.nan))
    event = Poisson(0.01, 1.0, 1)
    for each in (event, Composed((event, Gaussian(1.0))), accounting.PrivateSelection(event, 5.0)):
        assert (accounting.epsilon(each, 1e-5, "rdp"), accounting.delta(each, 1.0, "rdp")) == (math.inf, 1.0)
    assert PrivacyFilter().charge(event) == math.inf
