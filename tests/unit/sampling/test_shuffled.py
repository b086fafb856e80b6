"""Reshuffled epochs: what an example meets, and a sensitivity that holds for whatever it meets."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpcore import methods
from dpcore.accounting import Adjacency, Composed, Gaussian, MatrixGaussian
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedOrderSampler, ShuffledSampler
from dpcore.stages.strategies import from_matrix, sensitivity, strategy
from dpcore.stages.strategies.sensitivity import block_sensitivity, largest_column_norm

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
