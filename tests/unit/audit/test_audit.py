"""The audit's statistics against SciPy, simulations and quadrature; its step against `minimize`."""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

import dpcore
from dpcore import methods
from dpcore.accounting import Adjacency, Gaussian, PoissonSampledGaussian, TruncatedPoissonSampledGaussian
from dpcore.audit import audit, checks
from dpcore.audit.auditing import claimed_mu, guesses
from dpcore.audit.canaries import direction
from dpcore.audit.checks import participation_rate
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.sampling import (
    CyclicPoissonSampler,
    FixedOrderSampler,
    PoissonSampler,
    RandomAllocationSampler,
    TruncatedPoissonSampler,
    UserSampler,
)
from dpcore.spec.backends import load_backend
from dpcore.spec.grid import step_of
from dpcore.spec.ops import NoiseRow
from dpcore.stages.clipping import AdaptiveClip, Clip
from dpcore.stages.method import Method
from tests.depth import chosen
from tests.fresh import after

KEY = bytes(range(32))
ORDER = FixedOrderSampler(dataset_size=64, batch_size=32)
SGD = methods.dp_sgd(lr=0.1, noise_multiplier=2.0)
ADAPTIVE = methods.dp_sgd(lr=0.1, noise_multiplier=2.0, adaptive_clip=AdaptiveClip(bit_noise_std=3.0))


def test_a_gaussian_claim_is_its_mu() -> None:
    assert claimed_mu(Gaussian(2.0, 9, Adjacency.ZERO_OUT), 5.0, 1e-5) == (1.5, True)


@pytest.mark.parametrize("q", [0.05, 0.5])
def test_a_sampled_claim_allows_every_guess_about_one_step(q: float) -> None:
    """At every threshold; at the best one it allows next to no more."""
    sigma, event = 0.8, PoissonSampledGaussian(q, 0.8, 1)
    mu, gaussian = claimed_mu(event, dpcore.accounting.epsilon(event, 1e-5), 1e-5)
    assert not gaussian
    thresholds = np.linspace(-1, 4, 1001)
    out = stats.norm.cdf(thresholds / sigma)
    in_ = (1 - q) * (1 - out) + q * stats.norm.sf((thresholds - 1) / sigma)
    right = (out + in_) / 2
    allowed = stats.norm.cdf(mu / 2)
    assert right.max() <= allowed + 1e-12
    assert allowed == pytest.approx(right.max(), rel=1e-3)


def test_a_claim_without_a_delta_at_epsilon_0_is_that_of_its_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Randomized response of that epsilon, and with delta told outright."""
    monkeypatch.setattr(dpcore.accounting, "delta", lambda *_: 1.0)
    mu, _ = claimed_mu(PoissonSampledGaussian(0.1, 1.0, 1), 1.0, 0.01)
    assert stats.norm.cdf(mu / 2) == pytest.approx((math.e + 0.01) / (1 + math.e), rel=1e-12)
    assert stats.norm.cdf(claimed_mu(PoissonSampledGaussian(0.1, 1.0, 1), math.inf, 0.01)[0] / 2) < 1


def test_guesses_are_counted_and_their_threshold_follows_from_earlier_ones_alone() -> None:
    rng = np.random.default_rng(3)
    coins = rng.random(1000) < 0.5
    scores = rng.normal(size=1000) + 8.0 * coins + 20.0  # all of them above 0
    right = guesses(scores, coins)
    assert (right[:64] == coins[:64]).all()
    assert right[64:].all()
    plain = guesses(rng.normal(size=1000) + coins - 0.5, coins)
    assert 0.6 < plain.mean() < 0.76  # at the best threshold 0.69
    # A threshold chosen by the very guesses would be right more often than half of the time.
    nothing = [guesses(rng.normal(size=1000), rng.random(1000) < 0.5).mean() for _ in range(60)]
    assert np.mean(nothing) == pytest.approx(0.5, abs=0.008)


def test_probabilities_of_the_checks_are_uniform_or_larger() -> None:
    rng = np.random.default_rng(2)
    names = ("noise", "repeated", "rate", "examples", "batches", "copied", "sums", "halves", "turns")
    found = {name: [] for name in names}
    turns = np.where(np.arange(80) % 3 == 0, 12, 4)  # how often an example may be in
    for _ in range(400):
        nulls = rng.normal(size=(5, 2, 60))
        found["noise"].append(checks.too_little_noise(nulls))
        found["repeated"].append(checks.repeated_noise(nulls))
        used = rng.random((12, 80)) < 0.15
        found["rate"].append(checks.wrong_rate(int(used.sum()), used.size, 0.15))
        found["examples"].append(checks.wrong_spread(used.sum(axis=0), 12, 0.15))
        found["batches"].append(checks.wrong_spread(used.sum(axis=1), 80, 0.15))
        found["copied"].append(checks.copied_noise(rng.normal(size=40_000)))
        found["sums"].append(checks.wrong_sums(nulls[:, 0, :20]))
        sizes = used.sum(axis=1)
        found["halves"].append(checks.uneven_halves(used[:, :40].sum(axis=1), sizes, np.full(12, 80)))
        found["turns"].append(checks.wrong_spread((used & (np.arange(12)[:, None] < turns)).sum(axis=0), turns, 0.15))
    for name, values in found.items():
        for level in (0.01, 0.1):
            assert np.mean(np.array(values) <= level) <= stats.binom.ppf(0.9999, 400, level) / 400, name
        assert min(values) < (1 if name == "copied" else 0.1), name


def test_rates_of_more_coins_than_scipys_binomials_take() -> None:
    assert checks.wrong_rate(3_200_000, 3_200_000_000, 0.001) > 0.9
    assert checks.wrong_rate(1_000_000, 3_200_000_000, 0.001) == 0.0
    assert (checks.wrong_rate(0, 5, 0.0), checks.wrong_rate(5, 5, 1.0), checks.wrong_rate(4, 5, 1.0)) == (1.0, 1.0, 0.0)


def test_a_spread_of_rare_heads_alarms_no_more_often_than_it_says() -> None:
    """One head expected of each thousand coins, in 32 runs: the exact law of counts that all agree or nearly do."""
    rate, tosses, examples = 1e-3, 32, 1000
    heads = np.arange(120)  # in all: with so few, each example has one at most, nearly always
    chances = stats.binom.pmf(heads, tosses * examples, rate)
    values = [
        checks.wrong_spread(np.repeat([1, 0], [h, examples - h]), tosses, rate, low_only=True) for h in heads.tolist()
    ]
    for level in (6.3e-4, 6.2e-6, 6.2e-7):
        assert chances[np.array(values) <= level].sum() <= level
    assert checks.wrong_spread(np.full(80, 2), 12, 1 / 6) < 1e-4  # equal counts


@pytest.mark.parametrize(("batches", "examples", "rate"), [(1, 200, 0.005), (2, 200, 0.005), (1, 64, 0.98)])
def test_few_batches_alarm_no_more_often_than_it_says(batches: int, examples: int, rate: float) -> None:
    """The exact law of the sizes of one batch or two, of which a chi-square has too light a tail."""
    likely = stats.binom.ppf([1e-12, 1 - 1e-12], examples, rate).astype(int)
    sizes = list(itertools.combinations_with_replacement(range(likely[0], likely[1] + 1), batches))
    orders = np.array([len(set(itertools.permutations(each))) for each in sizes])
    chances = stats.binom.pmf(np.array(sizes), examples, rate).prod(axis=1) * orders
    assert chances.sum() == pytest.approx(1.0)
    values = np.array([checks.wrong_spread(np.array(each), examples, rate) for each in sizes])
    for level in (6.3e-4, 6.2e-6, 6.2e-7):
        assert chances[values <= level].sum() <= level
    assert values.min() < 1e-3


def test_one_coin_of_each_that_is_fair_has_one_spread() -> None:
    assert checks.wrong_spread(np.array([0, 1, 1, 0, 1]), 1, 0.5) == 1.0
    result = audit(SGD, PoissonSampler(dataset_size=100, batch_size=50), 1, delta=1e-5, key=KEY)
    assert not result.flagged


def test_values_that_occur_twice_are_found_wherever_they_are() -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(size=5000)
    assert checks.copied_noise(values) > 0.01
    assert checks.copied_noise(np.concatenate([values, values[100:400] * (1 + 1e-13)])) < 1e-4
    assert checks.copied_noise(np.zeros(100)) == 1.0  # no noise is no copy


def test_sums_that_are_off_in_any_way() -> None:
    rest = np.random.default_rng(5).normal(size=(6, 40))
    assert checks.wrong_sums(rest) > 0.01
    for wrong in (0.5 * rest, 1.6 * rest, rest + 0.5, np.repeat(rest[:1], 6, axis=0)):
        assert checks.wrong_sums(wrong) < 1e-4
    rest[2, 3] = np.nan  # a clip norm at its limit tells of no bits
    assert checks.wrong_sums(rest) > 0.01
    assert checks.wrong_sums(np.zeros((0, 3))) == 1.0


def test_the_bound_on_halves_holds_for_hypergeometric_numbers() -> None:
    population, drawn = 21, 8
    early = np.arange(drawn + 1)
    chances = stats.hypergeom(population, population // 2, drawn).pmf(early)
    one = np.array([drawn]), np.array([population])
    bounds = np.array([checks.uneven_halves(np.array([e]), *one) for e in early])
    for bound in bounds:
        assert chances[bounds <= bound].sum() <= bound + 1e-12
    assert checks.uneven_halves(np.full(9, 8), np.full(9, 8), np.full(9, 21)) < 1e-9


def test_runs_of_different_keys_seldom_agree() -> None:
    assert checks.same_batches(("a", "b", "c"), -50.0) == 1.0
    assert checks.same_batches(("a", "b", "a"), -50.0) == pytest.approx(3 * math.exp(-50))
    assert checks.same_batches(("a", "a", "a"), math.log(0.9)) == pytest.approx(0.9)


@pytest.mark.parametrize(("n", "q", "most"), [(5, 0.5, 3), (40, 0.25, 10), (4, 0.9, 4), (6, 0.1, 1)])
def test_how_often_an_example_is_in_a_cut_batch(n: int, q: float, most: int) -> None:
    sizes = np.arange(n + 1)
    expected = stats.binom(n, q).pmf(sizes) @ np.minimum(sizes, most) / n
    event = TruncatedPoissonSampledGaussian(n, q, most, 1.0, 1)
    assert participation_rate(event, q) == pytest.approx(expected, rel=1e-12)


def test_the_tail_of_a_correlation_by_quadrature() -> None:
    rows = np.zeros((2, 1, 8))
    rows[0, 0, 0], rows[1, 0, :2] = 1.0, (0.6, 0.8)

    def density(cosine: float) -> float:
        return (1 - cosine**2) ** ((8 - 3) / 2)

    tail = 2 * integrate.quad(density, 0.6, 1)[0] / integrate.quad(density, -1, 1)[0]
    assert checks.repeated_noise(rows) == pytest.approx(tail, rel=1e-9)


@pytest.mark.parametrize("rule", ["standard", "normalized"])
def test_a_canary_is_the_longest_vector_that_the_clip_lets_through(rule: str) -> None:
    tensors = ("first.weight", "first.bias", "second.weight")
    clip = Clip(2.0, rule, {"first.*": 0.3, "*": 5.0})
    grouping = clip.grouping(tensors)
    along = clip.sensitivity(grouping).contribution * direction(grouping, rule)
    bounds = (0.3, 5.0) if rule == "standard" else (1.0, 1.0)
    np.testing.assert_allclose([np.hypot(along[0], along[1]), along[2]], bounds)


@pytest.mark.parametrize(("method", "sampler"), [
    (SGD, ORDER), (SGD, PoissonSampler(dataset_size=100, batch_size=20)),
    (SGD, TruncatedPoissonSampler(dataset_size=100, batch_size=20, max_batch_size=20)),
    (SGD, RandomAllocationSampler(dataset_size=100, batch_size=50)),
    (ADAPTIVE, CyclicPoissonSampler(dataset_size=100, batch_size=20, groups=3)),
    (ADAPTIVE, UserSampler(PoissonSampler(dataset_size=64, batch_size=20), [i % 64 for i in range(150)], 2)),
])  # fmt: skip
def test_alarms_of_honest_runs_are_as_rare_as_stated(method: Method, sampler: object) -> None:
    alarms = exceeded = 0
    audits = chosen(12, 200) if method is SGD else chosen(12, 80)
    for number in range(audits):
        key = bytes([number]) * 32
        found = audit(method, sampler, 4, delta=1e-5, canaries=64, runs=2, confidence=0.9, key=key)
        alarms += found.flagged
        exceeded += found.lower_bound > found.claimed_epsilon
    assert alarms <= stats.binom.ppf(0.99, audits, 0.1)
    assert exceeded <= stats.binom.ppf(0.99, audits, 0.05)


class Twice(RandomAllocationSampler):
    """Enters some examples into two batches of an epoch, or into the first half's alone."""

    def indices(self, key: bytes, step: int, **shard: Any) -> Any:
        batch = super().indices(key, step, **shard)
        return np.union1d(batch, [7]) if self.batch_size == 50 else batch[batch < 60]


class Sorted(RandomAllocationSampler):
    """Fills batches in the order of the data."""

    def indices(self, key: bytes, step: int, **shard: Any) -> Any:
        return np.array_split(np.arange(self.dataset_size), self.steps_per_epoch)[step % self.steps_per_epoch]


@pytest.mark.parametrize(("kind", "words"), [(Twice, "more than once in an epoch"), (Sorted, "same batches")])
def test_batches_that_are_not_allocated_at_random_are_noticed(kind: type[RandomAllocationSampler], words: str) -> None:
    found = audit(SGD, kind(dataset_size=100, batch_size=50), 4, delta=1e-5, runs=4, key=KEY)
    assert found.flagged
    assert any(words in finding for finding in found.findings)


def test_a_key_repeats_an_audit_and_without_one_it_differs() -> None:
    one, two = (audit(SGD, ORDER, 2, delta=1e-5, runs=2, key=KEY) for _ in range(2))
    assert one == two
    assert audit(SGD, ORDER, 2, delta=1e-5, runs=2) != audit(SGD, ORDER, 2, delta=1e-5, runs=2)


def test_the_result_in_words_and_numbers() -> None:
    found = audit(SGD, ORDER, 2, delta=1e-5, runs=2, key=KEY)
    assert "proves no privacy" in str(found)
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["flagged"] is False
    assert told["canaries"] == 128


def test_the_fused_step_is_audited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is observed runs as plain operations; in training the fused one adds the noise, here ever so little less."""
    backend = load_backend("numpy")
    step = backend.step

    def weaker(slots: list[Any], noise: NoiseRow, *rest: Any, unit: float, **options: Any) -> None:
        less = noise._replace(scale=0.999 * noise.scale)
        own = step_of(less.scale, less.bits)
        step([slot._replace(total=slot.total * (unit / own)) for slot in slots], less, *rest, unit=own, **options)

    monkeypatch.setattr(backend, "step", weaker)
    found = audit(SGD, ORDER, 2, delta=1e-5, runs=2, key=KEY)
    assert found.flagged
    assert any("nobody observes" in finding for finding in found.findings)


@pytest.mark.parametrize(("change", "message"), [
    ({"delta": 0.0}, "delta=0.0"), ({"confidence": 1.0}, "confidence=1.0"), ({"canaries": 0}, "canaries=0"),
    ({"runs": 0}, "runs=0"), ({"canaries": 5, "runs": 12}, "at least 64"), ({"key": b"short"}, "key"),
    ({"dtype": "float16"}, "dtype='float16'"),
    ({"method": methods.dp_sgd(lr=0.1, noise_multiplier=0.0)}, "claims nothing"),
    ({"method": methods.dp_sgd(lr=0.1)}, "noise_multiplier=None"), ({"method": "dp_sgd"}, "must be a dpcore.Method"),
    ({"sampler": [[0, 1]]}, "must be a sampler"), ({"tensors": "x"}, "tensors='x'"),
])  # fmt: skip
def test_bad_input(change: dict[str, object], message: str) -> None:
    given = {"method": SGD, "sampler": ORDER, "steps": 2, "delta": 1e-5} | change
    with pytest.raises((ArgumentError, ArgumentTypeError, PrivacyError), match=message):
        audit(**given)


def test_the_package_does_not_load_what_is_slow() -> None:
    slow = ("torch", "triton", "scipy.stats", "matplotlib")
    code = f"import sys, dpcore.audit; print([m for m in {slow} if m in sys.modules])"
    assert after(code) == "[]"
