"""Epochs whose order is secret: reshuffled ones, and random allocation; what an example meets, and what it costs."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from dpcore.strategies import BandedToeplitz
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import chi2

from dpcore import accounting, methods, sampling
from dpcore.accounting import Adjacency, Composed, Gaussian, MatrixGaussian, RandomAllocationGaussian
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedOrderSampler, RandomAllocationSampler, ShuffledSampler, poisson
from dpcore.sampling.draw import row_words
from dpcore.stages.strategies import from_matrix, sensitivity, strategy
from dpcore.stages.strategies.sensitivity import block_sensitivity, largest_column_norm
from tests.refused import refused

KEY = bytes(range(32))


@given(st.integers(1, 30), st.data(), st.booleans())
def test_every_epoch_is_one_partition(dataset_size: int, data: st.DataObject, drop_last: bool) -> None:
    batch_size = data.draw(st.integers(1, dataset_size))
    sampler = ShuffledSampler(dataset_size=dataset_size, batch_size=batch_size, drop_last=drop_last)
    epoch = sampler.steps_per_epoch
    for number in (0, 1, 1000):
        used = [sampler.indices(KEY, number * epoch + step) for step in range(epoch)]
        assert [batch.size for batch in used[:-1]] == [batch_size] * (epoch - 1)
        together = np.concatenate(used)
        assert len(set(together.tolist())) == together.size
        assert together.size == (dataset_size // batch_size * batch_size if drop_last else dataset_size)
    steps = data.draw(st.integers(0, 3 * epoch))
    counts = Counter(i for step in range(steps) for i in sampler.indices(KEY, step).tolist())
    assert max(counts.values(), default=0) <= sampler.participations(steps)
    assert sampler.event(1.5, steps) == Gaussian(1.5, sampler.participations(steps), Adjacency.ZERO_OUT)
    blocks = sampler.blocks(steps)
    assert len(blocks) == sampler.participations(steps)
    assert [int(t) for block in blocks for t in block] == list(range(steps))
    assert all(len({int(t) // epoch for t in block}) == 1 for block in blocks)


def test_orders_are_uniform_and_fresh_in_every_epoch() -> None:
    sampler = ShuffledSampler(dataset_size=4, batch_size=2)
    first = [tuple(sampler.indices(KEY, 2 * epoch).tolist()) for epoch in range(1800)]
    counts = Counter(first)
    assert set(counts) == set(itertools.combinations(range(4), 2))
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4
    following = Counter(itertools.pairwise(first))
    assert len(following) == 36
    assert stats.chisquare(list(following.values())).pvalue > 1e-4
    assert sampler.indices(KEY, 0).tolist() != sampler.indices(bytes(32), 0).tolist()


def test_says_that_nothing_is_amplified() -> None:
    said = ShuffledSampler(dataset_size=100, batch_size=10).describe()
    assert said["secret"] is False
    assert "no amplification by sampling or shuffling is claimed" in said["note"]


# --------------------------------------------------------------------------------------------------------- sensitivity


def worst(matrix: np.ndarray, blocks: list[np.ndarray]) -> float:
    """The largest ||sum of +-columns|| over one column from each block, or none of it."""
    found = 0.0
    for chosen in itertools.product(*[[None, *block.tolist()] for block in blocks]):
        columns = matrix[:, [step for step in chosen if step is not None]]
        for signs in itertools.product((1.0, -1.0), repeat=columns.shape[1]):
            found = max(found, float(np.linalg.norm(columns @ np.array(signs))))
    return found


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 4))
def test_no_choice_of_one_step_from_each_epoch_moves_more(seed: int, steps: int, epoch: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = np.tril(rng.normal(size=(steps, steps)))
    if rng.integers(2):
        matrix = np.abs(matrix)
    np.fill_diagonal(matrix, rng.uniform(0.5, 2, steps))
    chosen = from_matrix(matrix)
    blocks = ShuffledSampler(dataset_size=epoch, batch_size=1).blocks(steps)
    bound, found = block_sensitivity(chosen, blocks, steps), worst(chosen.matrix(steps), blocks)
    assert found <= bound * (1 + 1e-12)
    if len(blocks) <= 2 and (matrix >= 0).all():
        # bound^2 = A + B + 2 D, the maxima by themselves; found^2 is at least A + B, and at least 4 D.
        assert bound <= found * 1.5**0.5 * (1 + 1e-12)


@pytest.mark.parametrize("epoch", [1, 2, 3, 5, 20])
def test_a_toeplitz_matrix_has_the_bound_of_its_entries(epoch: int) -> None:
    for steps in (1, 4, 12, 13):
        series = np.random.default_rng(steps).random(steps) + 0.01
        kinds = BandedToeplitz((1.0, 0, 0, 0.5)), BandedToeplitz(tuple(series)), strategy("square-root", steps)
        blocks = ShuffledSampler(dataset_size=epoch, batch_size=1).blocks(steps)
        for chosen in kinds:
            products = chosen.matrix(steps).T @ chosen.matrix(steps)
            bound = sum(products[np.ix_(one, other)].max() for one in blocks for other in blocks)
            assert block_sensitivity(chosen, blocks, steps) == pytest.approx(math.sqrt(bound), rel=1e-12)


def test_many_reshuffled_steps_take_no_matrix() -> None:
    chosen, steps = BandedToeplitz((1.0, 0.5, 0.25)), 10**6  # its columns would fill 8 TB
    sampler = ShuffledSampler(dataset_size=1000, batch_size=1)
    assert sampler.moved(chosen, steps) == pytest.approx(math.sqrt(1000 + 2 * 999 * 0.625 / 1.3125), rel=1e-9)


def test_neighboring_steps_of_two_epochs_count() -> None:
    """The (k, b) value is less than what reshuffled epochs can show."""
    matrix = np.eye(4) + np.diag([0.9, 0.9, 0.9], -1)
    chosen, blocks = from_matrix(matrix), ShuffledSampler(dataset_size=2, batch_size=1).blocks(4)
    fixed = sensitivity(chosen, FixedOrderSampler(dataset_size=2, batch_size=1).patterns(4), 4)
    found = worst(chosen.matrix(4), blocks)
    assert fixed < 0.9 * found
    assert block_sensitivity(chosen, blocks, 4) == pytest.approx(found)


def test_a_plan_accounts_for_any_steps_that_an_example_may_meet() -> None:
    sampler = ShuffledSampler(dataset_size=20, batch_size=5)
    plan = Plan(methods.memf(lr=0.1, noise_multiplier=2.0, strategy="square-root"), sampler, 8)
    expected = block_sensitivity(strategy("square-root", 8), sampler.blocks(8), 8)
    assert isinstance(plan.event, MatrixGaussian)
    assert (plan.event.sensitivity, plan.event.adjacency) == (expected, Adjacency.ZERO_OUT)
    one_epoch = largest_column_norm(strategy("square-root", 8), 4)
    assert plan.event_after(4).sensitivity == pytest.approx(one_epoch)
    fixed = Plan(methods.memf(lr=0.1, noise_multiplier=2.0, strategy="square-root"),
                 FixedOrderSampler(dataset_size=20, batch_size=5), 8)  # fmt: skip
    assert plan.event.mu > 1.02 * fixed.event.mu
    independent = Plan(methods.dp_sgd(lr=0.1, noise_multiplier=2.0), sampler, 9)
    assert independent.event == Gaussian(2.0, 3, Adjacency.ZERO_OUT)
    abandoned = Composed((Gaussian(2.0, 1, Adjacency.ZERO_OUT), Gaussian(2.0, 2, Adjacency.ZERO_OUT)))
    assert independent.event_after(3, 2) == abandoned


# Random allocation: every example once an epoch, every batch as likely, and what its runs and branches cost.


def test_every_example_takes_part_once_in_every_epoch_and_epochs_differ() -> None:
    sampler = RandomAllocationSampler(dataset_size=1000, batch_size=64)
    assert sampler.steps_per_epoch == 16
    epochs = [[sampler.indices(KEY, step) for step in range(16 * e, 16 * e + 16)] for e in range(3)]
    for batches in epochs:
        assert sorted(np.concatenate(batches).tolist()) == list(range(1000))
        assert all((np.diff(batch) > 0).all() for batch in batches)
    assert epochs[0][3].tolist() != epochs[1][3].tolist() != sampler.indices(bytes(32), 19).tolist()
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


def test_bad_input() -> None:
    refused(ArgumentError, "batch_size=20", RandomAllocationSampler, dataset_size=10, batch_size=20)
    refused(ArgumentError, "dataset_size", RandomAllocationSampler, dataset_size=0, batch_size=1)
    refused(ArgumentError, "2\\^24", RandomAllocationSampler, dataset_size=1 << 26, batch_size=1)
    refused(ArgumentError, "batch_size=None", sampling.sampler, "random-allocation", dataset_size=10)
    refused(ArgumentError, "groups", sampling.sampler, "random-allocation", dataset_size=10, batch_size=2, groups=3)
    moments = methods.dp_adam(lr=0.1, variant="independent_moments", noise_multiplier=1.0)
    sampler = RandomAllocationSampler(dataset_size=10, batch_size=5)
    refused(PrivacyError, "hard maximum", Plan, moments, sampler, 2)
