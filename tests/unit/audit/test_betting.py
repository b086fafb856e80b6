"""The sequential test: its false alarms, its power, and its bound, on guesses of a known law."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr, ndtri

from dpcore.accounting.gaussian import gaussian_epsilon
from dpcore.audit.verdict import THETAS, RatioBound, log_wealth
from dpcore.errors import ArgumentError
from tests.depth import chosen
from tests.refused import refused

CANARIES, STEPS = 8, 60


def shares(rng: np.random.Generator, mu: float, steps: int = STEPS, together: bool = False) -> np.ndarray:
    """Shares of right guesses of a mu-Gaussian mechanism's coins; `together`: all canaries share one noise."""
    right = rng.random((steps, 1 if together else CANARIES)) < ndtr(mu / 2)
    return right.mean(axis=1)


def test_the_best_guess_of_a_gaussian_mechanism_is_right_as_often_as_the_claim_allows():
    """Phi(mu / 2), by the threshold of the likelihood ratio; no other threshold is better."""
    for mu in (0.1, 1.0, 3.0):
        thresholds = np.linspace(-4, mu + 4, 20001)
        right = (ndtr(thresholds) + ndtr(mu - thresholds)) / 2
        assert right.max() == pytest.approx(ndtr(mu / 2), abs=1e-9)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("mu", [0.2, 1.0])
def test_a_true_claim_is_refuted_at_any_time_as_rarely_as_stated(mu, together):
    """Looked at after every step, and with guesses of one step that depend on each other."""
    rng, alpha, runs = np.random.default_rng(1), 0.1, chosen(40, 200)
    alarms = 0
    for _ in range(runs):
        bound = RatioBound(alpha)
        for share in shares(rng, mu, together=together):
            bound.add(float(share), mu)
        alarms += bound.refuted
    assert alarms <= alpha * runs + 2 * math.sqrt(alpha * runs)


def test_the_wealth_has_expectation_one_under_the_claim():
    """Exactly, over all outcomes of two steps of two canaries: the supermartingale's definition."""
    p, total = float(ndtr(0.4)), 0.0
    weights = {0.0: (1 - p) ** 2, 0.5: 2 * p * (1 - p), 1.0: p**2}
    for first, one in weights.items():
        for second, other in weights.items():
            total += one * other * math.exp(log_wealth(np.array([first, second]), np.array([p, p])))
    assert total == pytest.approx(1.0, rel=1e-12)
    assert max(THETAS) <= 1  # or the wealth could be negative


def test_twice_the_signal_is_refuted_soon_and_the_bound_stays_below_the_truth():
    rng = np.random.default_rng(2)
    steps, above = [], 0
    for _ in range(20):
        bound = RatioBound(0.01)
        for number, share in enumerate(shares(rng, 2.0, 200), 1):
            bound.add(float(share), 1.0)
            if bound.refuted:
                steps.append(number)
                break
        above += bound.lower > 2.0
    assert len(steps) == 20
    assert np.median(steps) < 60
    assert above == 0


def test_the_bound_never_falls_and_nears_what_ran():
    rng, bound, seen = np.random.default_rng(3), RatioBound(0.05), []
    for share in shares(rng, 1.5, 800):
        bound.add(float(share), 1.0)
        seen.append(bound.lower)
    assert seen == sorted(seen)
    assert 1.2 < bound.lower < 1.5


def test_claims_may_differ_from_step_to_step():
    """A weak step between strong ones: each bet is made at its own price."""
    rng = np.random.default_rng(4)
    mus = np.tile([0.3, 1.2], 100)
    bound = RatioBound(0.05)
    for mu in mus:
        bound.add(float((rng.random(CANARIES) < ndtr(mu / 2)).mean()), float(mu))
    assert bound.lower < 1.0


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_a_level_outside_of_0_and_1_is_refused(alpha):
    refused(ArgumentError, "alpha", RatioBound, alpha)


def test_shares_given_together_are_those_given_one_by_one():
    """The bound of all of them; one that is looked at more often may only be larger."""
    rng = np.random.default_rng(5)
    given = shares(rng, 2.0, 100)
    once, often = RatioBound(0.05), RatioBound(0.05)
    once.add(given, 1.0)
    for share in given:
        often.add(float(share), 1.0)
    assert 1.0 < once.lower <= often.lower
    assert (once.shares == often.shares).all()
    assert (once.mus == often.mus).all()


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_bounds_hold_for_what_a_gaussian_mechanism_shows(mu):
    """Of its mu, and of epsilon without knowing that it is Gaussian."""
    rng, alpha, runs, wrong = np.random.default_rng(1), 0.1, chosen(40, 200), np.zeros(2)
    for _ in range(runs):
        bound = RatioBound(alpha)
        bound.add(rng.random(300) < ndtr(mu / 2), mu)
        wrong += [bound.lower > 1, bound.epsilon(1e-5) > gaussian_epsilon(mu, 1e-5)]
        assert bound.epsilon(1e-5) <= gaussian_epsilon(bound.lower * mu, 1e-5) + 1e-9
    assert (wrong <= stats.binom.ppf(0.999, runs, alpha)).all()


def test_epsilon_of_any_mechanism_from_its_definition():
    """Of randomized response, which is right with probability e^epsilon / (1 + e^epsilon): the bound nears epsilon."""
    right = math.e / (1 + math.e)
    bound = RatioBound(0.05)
    bound.add(np.random.default_rng(6).random(20_000) < right, 2 * float(ndtri(right)))
    assert 0.9 < bound.epsilon(1e-5) < 1.0
    refuted = float(ndtr(bound.lower * float(ndtri(right))))
    assert bound.epsilon(0.1) == pytest.approx(math.log((refuted - 0.1) / (1 - refuted)))
    nothing = RatioBound(0.05)
    nothing.add([0.0, 1.0], 1.0)
    assert nothing.epsilon(1e-5) == 0.0
