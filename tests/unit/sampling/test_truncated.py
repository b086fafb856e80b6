"""Truncated Poisson sampling: the law of its batches, by enumeration, and what is accounted for it."""

import itertools
import math
from collections import Counter, defaultdict
from functools import partial
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpcore.accounting import Adjacency, TruncatedPoissonSampledGaussian, delta_interval, epsilon_interval
from dpcore.accounting.phases import Phases, PoissonStep, phases, truncated_components
from dpcore.accounting.pld.intervals import _delta
from dpcore.accounting.renyi import step_rdp
from dpcore.errors import ArgumentError
from dpcore.sampling import PoissonSampler, TruncatedPoissonSampler
from dpcore.sampling.poisson import smallest_maximum
from tests.refused import refused

KEY = bytes(range(32))
Batch = tuple[int, ...]


def law(n: int, q: float, most: int) -> dict[Batch, float]:
    """The probability of every batch: all coins, and all subsets of those that land."""
    result: dict[Batch, float] = defaultdict(float)
    for size in range(n + 1):
        for landed in itertools.combinations(range(n), size):
            chance = q**size * (1 - q) ** (n - size)
            kept = min(size, most)
            for batch in itertools.combinations(landed, kept):
                result[batch] += chance / comb(size, kept)
    return result


def test_batches_have_the_law_of_cut_coins() -> None:
    sampler = TruncatedPoissonSampler(dataset_size=5, sample_rate=0.5, max_batch_size=3)
    counts = Counter(tuple(sampler.indices(KEY, step).tolist()) for step in range(4000))
    expected = law(5, sampler.sample_rate, 3)
    assert set(counts) <= set(expected)
    assert stats.chisquare([counts[b] for b in expected], [4000 * p for p in expected.values()]).pvalue > 1e-4
    # Another maximum's law is told apart: the test has power.
    batches = sorted(b for b in law(5, 0.5, 4) if len(b) < 4)
    other = np.array([law(5, 0.5, 4)[b] for b in batches])
    assert stats.chisquare([counts[b] for b in batches], 4000 * other / other.sum()).pvalue < 1e-4


@pytest.mark.parametrize(("n", "q", "most"), [(5, 0.5, 3), (6, 0.3, 2), (4, 0.2, 1), (5, 0.9, 4), (4, 0.6, 4)])
def test_given_the_others_an_example_is_in_with_the_probability_that_is_accounted(n: int, q: float, most: int) -> None:
    """The derivation of `dpcore.accounting.phases`, step by step, from the law of all batches."""
    chances = law(n, q, most)
    rate, weight = {}, defaultdict(float)
    for size in range(n):
        for others in itertools.combinations(range(1, n), size):
            out, inside = chances.get(others, 0.0), chances.get((0, *others), 0.0)
            weight[size] += out + inside
            if out + inside > 0:
                # Which others there are tells no more than how many.
                assert rate.setdefault(size, inside / (out + inside)) == pytest.approx(inside / (out + inside))
    mixture: dict[float, float] = defaultdict(float)
    for size, chance in rate.items():
        mixture[round(chance, 9)] += weight[size]
    event = TruncatedPoissonSampledGaussian(n, q, most, 1.5, 1)
    accounted = {round(r, 9): w for w, r, sigma in truncated_components(event) if sigma == 1.5}
    assert len(accounted) == len(truncated_components(event))
    assert accounted == pytest.approx({r: w for r, w in mixture.items() if r > 0})


@given(st.integers(1, 10**7), st.floats(1e-4, 1))
def test_the_default_maximum_is_the_smallest_that_seldom_overflows(n: int, q: float) -> None:
    most = smallest_maximum(n, q)
    assert stats.binom.sf(most, n, q) < 1e-6
    assert most == 1 or stats.binom.sf(most - 1, n, q) >= 1e-6 * (1 - 1e-6)


def test_event_and_settings() -> None:
    sampler = TruncatedPoissonSampler(dataset_size=60_000, batch_size=256)
    assert sampler.max_batch_size == 335
    event = sampler.event(1.1, 500)
    assert event == TruncatedPoissonSampledGaussian(60_000, sampler.sample_rate, 335, 1.1, 500, Adjacency.ZERO_OUT)
    again = TruncatedPoissonSampler(
        dataset_size=60_000, batch_size=256, sample_rate=sampler.sample_rate, max_batch_size=335
    )  # fmt: skip
    assert again == sampler
    everyone = TruncatedPoissonSampler(dataset_size=7, batch_size=7)
    assert (everyone.max_batch_size, everyone.indices(KEY, 3).tolist()) == (7, list(range(7)))
    assert TruncatedPoissonSampler(dataset_size=9, batch_size=9, max_batch_size=9).max_batch_size == 9


def test_refuses() -> None:
    cut = partial(TruncatedPoissonSampler, dataset_size=100, batch_size=20)
    words = "max_batch_size=19: must be at least the expected batch size 20"
    refused(ArgumentError, words, cut, max_batch_size=19)
    refused(ArgumentError, r"max_batch_size=101: .* at most dataset_size=100", cut, max_batch_size=101)
    refused(ArgumentError, "max_batch_size=0", cut, max_batch_size=0)
    refused(ArgumentError, r"give batch_size .* or sample_rate", TruncatedPoissonSampler, dataset_size=10)


@given(st.integers(1, 60), st.data())
def test_whatever_the_settings_a_batch_is_a_subset_of_the_coins_and_not_too_large(size: int, data: st.DataObject):
    """Without overflow it is the batch of Poisson sampling."""
    batch_size = data.draw(st.floats(0.05, size))
    most = data.draw(st.none() | st.integers(int(np.ceil(batch_size)), size))
    sampler = TruncatedPoissonSampler(dataset_size=size, batch_size=batch_size, max_batch_size=most)
    plain = PoissonSampler(dataset_size=size, batch_size=batch_size)
    assert (sampler.sample_rate, sampler.steps_per_epoch) == (plain.sample_rate, plain.steps_per_epoch)
    for step in (0, 7):
        batch, landed = sampler.indices(KEY, step), plain.indices(KEY, step)
        assert batch.dtype == np.int64
        assert np.all(np.diff(batch) > 0)
        assert set(batch.tolist()) <= set(landed.tolist())
        assert batch.size == min(landed.size, sampler.max_batch_size)


@pytest.mark.parametrize("others", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (-5.0, -5.0, -5.0), (1.0, -0.5, 0.2)])
@pytest.mark.parametrize(("q", "most"), [(0.5, 2), (0.3, 1), (0.6, 3)])
def test_no_release_of_a_cut_batch_tells_more_than_is_accounted(others: tuple[float, ...], q: float, most: int) -> None:
    """The divergences of the sum itself, by numerical integration, of one example's vector against its zero-out."""
    sigma, z = 0.8, np.linspace(-14, 14, 40_001)
    vectors = np.array([1.0, *others])
    chances = law(4, q, most)

    def density(values: np.ndarray) -> np.ndarray:
        total = np.zeros_like(z)
        for batch, chance in chances.items():
            total += chance * stats.norm.pdf(z, values[list(batch)].sum(), sigma)
        return total

    def divergence(p: np.ndarray, r: np.ndarray, epsilon: float) -> float:
        return float(np.maximum(p - np.exp(epsilon) * r, 0).sum() * (z[1] - z[0]))

    with_it, without = density(vectors), density(vectors * [0, 1, 1, 1])
    components = truncated_components(TruncatedPoissonSampledGaussian(4, q, most, sigma, 1))
    parts = [
        (weight, rate * stats.norm.pdf(z, 1, sigma) + (1 - rate) * stats.norm.pdf(z, 0, sigma))
        for weight, rate, _ in components
    ]
    base = stats.norm.pdf(z, 0, sigma)
    ratios = []
    for epsilon in (0.0, 0.3, 1.0):
        for direction in (1, -1):
            found = divergence(*(with_it, without)[::direction], epsilon)
            accounted = sum(weight * divergence(*(part, base)[::direction], epsilon) for weight, part in parts)
            assert found <= accounted + 1e-9
            ratios.append(found / accounted if accounted > 1e-6 else 0.0)
    if others[0] == -5.0:  # vectors that give away how many others are in: then the bound is reached
        assert max(ratios) > 0.98
    if others[0] == -5.0 and most == 1:  # and the event of Poisson sampling at the same rate would be wrong
        poisson = q * stats.norm.pdf(z, 1, sigma) + (1 - q) * base
        assert divergence(without, with_it, 0.3) > 6 * divergence(base, poisson, 0.3)


@pytest.mark.parametrize("n", [2**31 - 1, 2**31 + 7, 10**10, 2**53])
def test_very_large_data_sets_are_those_of_the_poisson_limit(n: int) -> None:
    """Bin(n, 20 / n) is Poisson(20); `scipy.special.bdtr` is NaN from 2^31 on, and an epsilon of 0 followed."""
    chance = [math.exp(-20 + k * math.log(20) - math.lgamma(k + 1)) for k in range(200)]
    below, almost = sum(chance[:19]), chance[19]
    cut = 20 / n * sum(chance[21:])  # Pr[the example lands and is kept, where some are cut]
    parts = truncated_components(TruncatedPoissonSampledGaussian(n, 20 / n, 20, 1.0, 1))
    rate = (20 / n * almost + cut) / (20 / n * almost + cut + almost)
    assert [part[0] for part in parts] == pytest.approx([below, almost], rel=1e-6)
    assert [part[1] for part in parts] == pytest.approx([20 / n, rate], rel=1e-6)
    assert smallest_maximum(n, 20 / n) == smallest_maximum(10**6, 20 / 10**6)


@pytest.mark.parametrize(("n", "mean"), [(60_000, 256), (10**8, 30), (10**9, 30), (10**9, 10**6), (10**12, 10**9)])
@pytest.mark.parametrize("adjacency", ["zero-out", "add-remove"])
def test_the_error_of_a_step_is_a_bound_on_that_of_its_weights_and_rates(n: int, mean: int, adjacency: str) -> None:
    mpmath = pytest.importorskip("mpmath")
    q, most = mean / n, mean + round(3 * math.sqrt(mean))
    event = TruncatedPoissonSampledGaussian(n, q, most, 1.0, 1, adjacency)
    step = phases(event).steps[0][0]
    with mpmath.workdps(60):

        def exactly(k: int, n: int) -> object:
            some = [mpmath.loggamma(x + 1) for x in (n, k, n - k)]
            return mpmath.exp(some[0] - some[1] - some[2] + k * mpmath.log(q) + (n - k) * mpmath.log1p(-mpmath.mpf(q)))

        def more_than(k: int, n: int) -> object:
            # Terms over the first one, in whole numbers: those of mpmath take ten times as long.
            odds, one = int(mpmath.mpf(q) / (1 - mpmath.mpf(q)) * 2**200), 2**200
            total, term, j = 0, one, k + 1
            while term * 10**18 > total:
                total, term, j = total + term, term * (n - j) * odds // (j + 1) >> 200, j + 1
            return exactly(k + 1, n) * total / one

        cut = mpmath.mpf(most) / n * more_than(most, n)
        full, almost = more_than(most - 1, n - 1), exactly(most - 1, n - 1)
        zero_out = adjacency == "zero-out"
        weight, inside = (
            (q * almost + cut + (1 - mpmath.mpf(q)) * almost, q * almost + cut) if zero_out else (full, cut)
        )
        (other, _, _), (found, rate, _) = step.components
        for stated, exact in ((found, weight), (found * rate, inside), (found * (1 - rate), weight - inside),
                              (other, 1 - full - (almost if zero_out else 0))):  # fmt: skip
            assert abs(stated / exact - 1) < step.error / 2


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bounds_hold_for_all_weights_and_rates_within_the_error(sign: float) -> None:
    def law(error: float, share: float) -> PoissonStep:
        table = ((0.7, 0.05, 1.0), (0.2, 0.3, 0.7))
        return PoissonStep(tuple((w * (1 + share), p * (1 + 2 * share), s) for w, p, s in table), error)

    stated, other = law(6e-4 / 0.7, 0.0), law(0.0, sign * 1e-4)
    orders = np.array([1.01, 1.5, 2.0, 9.0, 300.0])
    assert np.all(step_rdp(stated, orders) >= step_rdp(other, orders))
    (low, high), here = (_delta(Phases(0.0, ((step, 50),)), 2.0, None) for step in (stated, other))
    assert low <= here.lower
    assert here.upper <= high


def test_rates_whose_rest_has_no_digits_are_accounted_as_if_nothing_were_sampled() -> None:
    event = TruncatedPoissonSampledGaussian(7, 1 - 6.7e-7, 6, 8.6e6, 20_850)
    found = delta_interval(event, 0.0)
    assert found.lower == 0.0 < found.upper <= 1.001 * math.erf(math.sqrt(20_850 / 8) / 8.6e6)
    assert epsilon_interval(event, 1e-12).upper > 0.0


def test_data_sets_beyond_exact_counts_are_refused() -> None:
    for n in (2**53 + 1, 10**300):
        with pytest.raises(ArgumentError, match=r"dataset_size: must be at most 2\^53"):
            TruncatedPoissonSampledGaussian(n, 1e-9, 20, 1.0, 10)
