"""Cyclic Poisson sampling: groups, coins, bands, and what branches cost."""

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpcore import methods
from dpcore.accounting import Adjacency, Composed, CyclicPoissonSampledGaussian, Gaussian
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.plan.plan import Plan
from dpcore.sampling import CyclicPoissonSampler, UserSampler
from dpcore.spec.keys import RunKeys
from dpcore.stages.strategies import Banded, BandedToeplitz, Identity, from_matrix, strategy
from dpcore.stages.strategies.sensitivity import bands, largest_column_norm
from tests.refused import refused

KEY = bytes(range(32))


@given(st.integers(1, 60), st.data(), st.booleans())
def test_groups_are_a_partition_in_equal_parts(size: int, data: st.DataObject, shuffle: bool) -> None:
    groups = data.draw(st.integers(1, size))
    sampler = CyclicPoissonSampler(dataset_size=size, batch_size=size / groups / 2, groups=groups, shuffle=shuffle)
    parts = [sampler.group(number) for number in range(groups)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(size))
    sizes = [part.size for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == sampler.max_batch_size
    wanted = Fraction(size / groups / 2) * groups / size
    assert 0 <= wanted - Fraction(sampler.sample_rate) < Fraction(1, 2**32)
    if not shuffle:
        assert np.concatenate(parts).tolist() == list(range(size))
    for step in (0, 1, groups, 5 * groups + 3):
        assert set(sampler.indices(KEY, step).tolist()) <= set(parts[step % groups].tolist())


def test_the_groups_are_public_and_the_coins_are_not() -> None:
    """A branch of a run draws fresh coins under another key, and no example may come sooner than its turn."""
    sampler = CyclicPoissonSampler(dataset_size=300, batch_size=30, groups=5)
    keys = RunKeys.new()
    branch = keys.fork(keep_sampling=sampler.keeps_order, row=7)
    assert branch.sampling != keys.sampling
    for step in range(10):
        one, other = sampler.indices(keys.sampling, step), sampler.indices(branch.sampling, step)
        assert one.tolist() != other.tolist()
        members = set(sampler.group(step % 5).tolist())
        assert set(one.tolist()) | set(other.tolist()) <= members
    assert sampler.group(0).tolist() != list(range(60))


def test_each_example_of_the_group_is_taken_at_the_rate() -> None:
    sampler = CyclicPoissonSampler(dataset_size=203, batch_size=20, groups=4)
    taken = np.zeros(203)
    for step in range(1600):
        taken[sampler.indices(KEY, step)] += 1
    for rate, fits in ((80 / 203, True), (75 / 203, False)):
        z = (taken - 400 * rate) / math.sqrt(400 * rate * (1 - rate))
        together = 2 * stats.norm.sf(abs(z.sum()) / math.sqrt(203))
        each = stats.chi2(203).sf(float(z @ z))
        assert (min(together, each) > 1e-4) == fits


def test_bands_are_those_of_the_matrix() -> None:
    four = np.tril(np.ones((4, 4)))
    for chosen, count in (
        (Identity(), 1),
        (BandedToeplitz((1.0, 0.5, 0.2)), 3),
        (Banded(np.array([[1.0, 1, 1, 1], [0.5, 0, 0.5, 0]])), 2),
        (from_matrix(four), 4),
        (from_matrix(np.eye(4) + np.diag([0.5, 0.5], -2)), 3),
        (strategy("square-root", 6), 6),
        (strategy("banded-inverse-square-root", 6, bands=2), 6),
        (strategy("tree", 6), None),
    ):
        rows = min(chosen.steps or 6, 6)
        row, column = np.nonzero(chosen.matrix(rows))
        assert bands(chosen, rows) == (row - column).max() + 1
        assert count is None or bands(chosen, rows) == count
        norm = np.linalg.norm(chosen.matrix(rows), axis=0).max()
        assert largest_column_norm(chosen, rows) == pytest.approx(norm)
    assert bands(BandedToeplitz((1.0, 0.5, 0.2)), 2) == 2


SAMPLER = CyclicPoissonSampler(dataset_size=100, batch_size=10, groups=3)
BAND3 = BandedToeplitz((1.0, 0.5, 0.2))


def plan(chosen: object = None, steps: int = 8, sampler: object = SAMPLER) -> Plan:
    method = methods.memf(lr=0.1, noise_multiplier=2.0, strategy=chosen) if chosen is not None else methods.dp_sgd(
        lr=0.1, noise_multiplier=2.0)  # fmt: skip
    return Plan(method, sampler, steps)  # type: ignore[arg-type]


def test_a_plan_accounts_for_banded_noise_as_amplified() -> None:
    event = plan(BAND3).event
    assert isinstance(event, CyclicPoissonSampledGaussian)
    assert event.sample_rate == SAMPLER.sample_rate == math.floor(0.3 * 2**32) / 2**32
    assert (event.groups, event.noise_multiplier, event.steps, event.participations) == (3, 2.0, 8, 3)
    assert event.sensitivity == pytest.approx(1.0)
    assert event.adjacency is Adjacency.ZERO_OUT
    assert plan().event == CyclicPoissonSampledGaussian(SAMPLER.sample_rate, 3, 2.0, 1.0, 8)
    assert plan(BAND3).event_after(0).participations == 0
    users = UserSampler(SAMPLER, np.arange(100), 1)
    assert plan(BAND3, sampler=users).event == event


@pytest.mark.parametrize(
    "chosen", [BandedToeplitz((1.0, 0.5, 0.2, 0.1)), strategy("banded-inverse-square-root", 8, bands=2),
               strategy("square-root", 8), strategy("tree", 8)]
)  # fmt: skip
def test_more_bands_than_groups_are_refused(chosen: object) -> None:
    refused(PrivacyError, r"at most as many bands as groups, 3, .*BandedToeplitz or Banded", plan, chosen)


def test_a_plan_says_nothing_of_steps_beyond_it() -> None:
    """Its width and its columns are those of its steps: of the same strategy over more steps they are larger."""
    short = plan(BAND3, steps=2)
    assert short.event.sensitivity < plan(BAND3).event.sensitivity
    for beyond in (short.event_after, lambda steps: short.epsilon(1e-5, steps=steps)):
        refused(ArgumentError, "steps=8: must be at most 2, the steps of the plan", beyond, 8)


def test_branches_are_charged_for_shared_coins() -> None:
    whole = plan(BAND3)
    event = whole.event_after(5, ((1, 3),))
    assert whole.event_after(5, 2).events[2].count == 4  # of steps that may each lie on a branch of their own
    others = CyclicPoissonSampledGaussian(SAMPLER.sample_rate, 1, 2.0, event.events[0].sensitivity, 2,
                                          event.events[0].strategy)  # fmt: skip
    assert isinstance(event, Composed)
    assert event.events[:2] == (whole.event_after(5), others)
    assert event.events[2].count == 2
    assert event.events[2].noise_multiplier == pytest.approx(2.0)
    assert plan().event_after(5, 2) == Composed((plan().event_after(5), CyclicPoissonSampledGaussian(
        SAMPLER.sample_rate, 1, 2.0, 1.0, 2)))  # fmt: skip
    assert isinstance(event.events[2], Gaussian)


@given(st.integers(0, 10**6))
def test_a_tree_of_branches_has_no_more_coins_than_are_charged(seed: int) -> None:
    """Squared norms that coins move, summed over a random tree of branches, by what the charge calls them."""
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(1, 5))
    wide = int(rng.integers(1, groups + 1))
    column = rng.uniform(0, 1, wide)
    column[0] = 1.0
    squares = column**2 / (column**2).sum()
    parent, depth, here = [-1], [0], 0  # nodes are releases; the first has no parent
    for _ in range(int(rng.integers(0, 14))):
        if rng.random() < 0.3:  # back to some checkpoint, which is a node that goes on
            here = int(rng.integers(len(parent)))
        parent.append(here)
        depth.append(depth[here] + 1)
        here = len(parent) - 1
    path = {here}
    while parent[min(path)] >= 0:
        path.add(parent[min(path)])
    for turn in range(groups):  # an example of that group, whose coins all land
        single, shared = 0, 0.0
        for node in (n for n in range(len(parent)) if depth[n] % groups == turn):
            # All releases below that this coin's column reaches, and whether they are on one line.
            reached, level, line = squares[0], [node], True
            for lag in range(1, wide):
                level = [n for n in range(len(parent)) if parent[n] in level]
                line &= len(level) <= 1
                reached += squares[lag] * len(level)
            if line:
                assert reached <= 1 + 1e-12
                single += node not in path
            else:
                shared += reached
        abandoned = len(parent) - len(path)
        assert single <= abandoned
        assert shared <= 2 * (len(set(range(len(parent))) - set(parent)) - 1) + 1e-12  # a leaf for each branch left
        assert shared == 0 or wide > 1


def test_refuses() -> None:
    ten = partial(CyclicPoissonSampler, dataset_size=10)
    refused(ArgumentError, "groups=11: must be at most dataset_size=10", ten, batch_size=1, groups=11)
    words = "batch_size=6: must be at most 5, the examples of one of 2 groups"
    refused(ArgumentError, words, ten, batch_size=6, groups=2)
    refused(ArgumentError, "groups=0", ten, batch_size=1, groups=0)
    refused(ArgumentError, r"at least 2\^-32", ten, batch_size=1e-10, groups=2)
    refused(ArgumentError, "number=3: must be less than groups=3", SAMPLER.group, 3)
    banded = partial(SAMPLER.banded_event, 1.0, 5, 0, 0, column_norm=1.0, strategy="x")
    refused(ArgumentError, "bands=4: must be at most groups=3", banded, bands=4)
