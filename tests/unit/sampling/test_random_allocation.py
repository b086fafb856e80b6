"""Random allocation: every example once an epoch, every batch as likely, and what its runs and branches cost."""

from __future__ import annotations

import numpy as np
import pytest
from dpcore.strategies import BandedToeplitz
from scipy.stats import chi2

from dpcore import accounting, methods, sampling
from dpcore.accounting import Adjacency, Composed, Gaussian, MatrixGaussian, RandomAllocationGaussian
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.plan.plan import Plan
from dpcore.sampling import RandomAllocationSampler, poisson
from dpcore.sampling.draw import row_words
from dpcore.stages.strategies.sensitivity import block_sensitivity
from tests.refused import refused

KEY = bytes(range(32))


def test_every_example_takes_part_once_in_every_epoch_and_epochs_differ() -> None:
    sampler = RandomAllocationSampler(dataset_size=1000, batch_size=64)
    assert sampler.steps_per_epoch == 16
    epochs = [[sampler.indices(KEY, step) for step in range(16 * e, 16 * e + 16)] for e in range(3)]
    for batches in epochs:
        assert sorted(np.concatenate(batches).tolist()) == list(range(1000))
        assert all((np.diff(batch) > 0).all() for batch in batches)
    assert epochs[0][3].tolist() != epochs[1][3].tolist()
    assert len({len(batch) for batch in epochs[0]}) > 1  # sizes vary: nothing is evened out


def test_every_batch_is_as_likely_and_examples_are_independent() -> None:
    sampler = RandomAllocationSampler(dataset_size=300, batch_size=100)  # three batches
    counts, pairs = np.zeros((300, 3)), np.zeros((3, 3))
    epochs = 600
    for epoch in range(epochs):
        place = np.empty(300, np.int64)
        for batch in range(3):
            place[sampler.indices(KEY, 3 * epoch + batch)] = batch
        counts[np.arange(300), place] += 1
        np.add.at(pairs, (place[0::2], place[1::2]), 1)
    one = ((counts - epochs / 3) ** 2 / (epochs / 3)).sum()
    assert chi2.sf(one, 300 * 2) > 1e-6
    expected = epochs * 150 / 9
    assert chi2.sf(((pairs - expected) ** 2 / expected).sum(), 8) > 1e-6


def test_words_beyond_the_largest_multiple_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # With words of 3 bits and 3 batches, 6 and 7 are no choice: the example takes its word of the next attempt.
    monkeypatch.setattr(poisson, "WORDS", 8)
    words = lambda start, size: (row_words(KEY, 0)(start, size) >> np.uint32(29)).astype(np.uint32)  # noqa: E731
    monkeypatch.setattr(poisson.draw, "row_words", lambda key, row: words)
    poisson._epoch.cache_clear()
    members, ends = poisson._epoch(KEY, 0, 500, 3)
    poisson._epoch.cache_clear()
    table = np.stack([words(attempt * 500, 500) for attempt in range(40)]).astype(int)
    first = np.array([next(word for word in table[:, i] if word < 6) % 3 for i in range(500)])
    for batch in range(3):
        assert members[ends[batch] : ends[batch + 1]].tolist() == np.flatnonzero(first == batch).tolist()


def test_shards_join_and_a_step_can_be_asked_for_at_any_time() -> None:
    sampler = RandomAllocationSampler(dataset_size=500, batch_size=50)
    whole = sampler.indices(KEY, 27)
    shares = [sampling.shard(sampler, rank, world_size=3).indices(KEY, 27) for rank in range(3)]
    assert np.concatenate(shares).tolist() == whole.tolist()
    assert (sampler.indices(KEY, 5).tolist(), sampler.indices(KEY, 27).tolist()) == (
        RandomAllocationSampler(dataset_size=500, batch_size=50).indices(KEY, 5).tolist(), whole.tolist(),
    )  # fmt: skip
    assert sampler.indices(bytes(32), 27).tolist() != whole.tolist()


def test_a_begun_epoch_counts_as_a_whole_one() -> None:
    sampler = RandomAllocationSampler(dataset_size=1000, batch_size=100)
    assert [sampler.event(1.0, steps).epochs for steps in (0, 1, 10, 11, 20)] == [0, 1, 1, 2, 2]
    assert sampler.event(1.0, 10) == RandomAllocationGaussian(10, 1.0, 1)
    assert sampler.adjacency is Adjacency.ADD_REMOVE


def test_what_is_released_again_is_charged_without_amplification() -> None:
    sampler = RandomAllocationSampler(dataset_size=1000, batch_size=100)
    assert sampler.keeps_order  # a branch keeps the batches of an epoch
    plan = Plan(methods.dp_sgd(lr=0.1, noise_multiplier=2.0), sampler, steps=30)
    assert plan.event == RandomAllocationGaussian(10, 2.0, 3)
    event = plan.event_after(30, [(12, 18), (19, 25)])  # the second epoch twice, the third once
    assert event == Composed((RandomAllocationGaussian(10, 2.0, 3), Gaussian(2.0, 3)))
    assert event.adjacency is Adjacency.ADD_REMOVE
    assert plan.event_after(30, 4) == Composed((RandomAllocationGaussian(10, 2.0, 3), Gaussian(2.0, 4)))


def test_the_charge_of_a_branch_covers_the_likelihood_ratio_of_both() -> None:
    # One epoch of two batches at sigma, its second batch released twice: L = (X_1 + X_2 X_3) / 2 under Q.
    sigma, trials = 1.0, 2_000_000
    generator = np.random.default_rng(3)
    x = np.exp(generator.standard_normal((3, trials)) / sigma - 0.5 / sigma**2)
    ratio = (x[0] + x[1] * x[2]) / 2
    sampler = RandomAllocationSampler(dataset_size=10, batch_size=5)
    event = Plan(methods.dp_sgd(lr=0.1, noise_multiplier=sigma), sampler, steps=2).event_after(2, [(1, 2)])
    for epsilon in (0.0, 1.0, 2.0, 3.0):
        a = np.exp(epsilon)
        true = max(np.maximum(ratio - a, 0).mean(), np.maximum(1 - a * ratio, 0).mean())
        assert true <= accounting.delta_interval(event, epsilon).upper
    # Without the charge it would not be covered.
    assert np.maximum(ratio - np.e, 0).mean() > accounting.delta_interval(sampler.event(sigma, 2), 1.0).upper


def test_correlated_noise_is_covered_without_amplification() -> None:
    sampler = RandomAllocationSampler(dataset_size=1000, batch_size=100)
    strategy = BandedToeplitz((1.0, 0.5, 0.375))
    plan = Plan(methods.memf(lr=0.1, strategy=strategy, noise_multiplier=2.0), sampler, steps=20)
    blocks = [np.arange(10), np.arange(10, 20)]
    assert isinstance(plan.event, MatrixGaussian)
    assert plan.event.sensitivity == block_sensitivity(strategy, blocks, 20)


def test_users_are_allocated_too() -> None:
    of_example = np.arange(60) % 12
    users = sampling.UserSampler(
        RandomAllocationSampler(dataset_size=12, batch_size=3), of_example, max_examples_per_user=9
    )
    seen = np.concatenate([users.indices(KEY, step) for step in range(users.steps_per_epoch)])
    assert sorted(seen.tolist()) == list(range(60))
    assert users.event(1.0, 4) == RandomAllocationGaussian(4, 1.0, 1)


def test_bad_input() -> None:
    refused(ArgumentError, "batch_size=20", RandomAllocationSampler, dataset_size=10, batch_size=20)
    refused(ArgumentError, "dataset_size", RandomAllocationSampler, dataset_size=0, batch_size=1)
    refused(ArgumentError, "2\\^24", RandomAllocationSampler, dataset_size=1 << 26, batch_size=1)
    refused(ArgumentError, "batch_size=None", sampling.sampler, "random-allocation", dataset_size=10)
    refused(ArgumentError, "groups", sampling.sampler, "random-allocation", dataset_size=10, batch_size=2, groups=3)
    moments = methods.dp_adam(lr=0.1, variant="independent_moments", noise_multiplier=1.0)
    sampler = RandomAllocationSampler(dataset_size=10, batch_size=5)
    refused(PrivacyError, "hard maximum", Plan, moments, sampler, 2)
