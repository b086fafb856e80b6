"""The samplers: who takes part, how often, and what is accounted for it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpcore import sampling
from dpcore.accounting import Adjacency, FixedSizeSampledGaussian, Gaussian, PoissonSampledGaussian
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.sampling import FixedBatches, FixedOrderSampler, FixedSizeSampler, PoissonSampler, Sampler, shard
from dpcore.spec.backends import load_backend
from dpcore.spec.stream import Stream
from tests.depth import chosen
from tests.refused import refused

KEY = bytes(range(32))
SAMPLERS: list[Sampler] = [
    PoissonSampler(dataset_size=103, batch_size=10), FixedSizeSampler(dataset_size=103, batch_size=10),
    FixedOrderSampler(dataset_size=103, batch_size=10), FixedBatches(np.arange(103)[None, :].repeat(3, axis=0)),
    sampling.TruncatedPoissonSampler(dataset_size=103, batch_size=10, max_batch_size=11),
    sampling.ShuffledSampler(dataset_size=103, batch_size=10),
    sampling.CyclicPoissonSampler(dataset_size=103, batch_size=10, groups=5),
]  # fmt: skip
KINDS = [type(sampler).__name__ for sampler in SAMPLERS]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=KINDS)
class TestContract:
    """What holds for every sampler."""

    def test_indices_are_sorted_distinct_and_in_range(self, sampler: Sampler) -> None:
        for step in (0, 1, 50, 2**32 - 2):
            batch = sampler.indices(KEY, step)
            assert batch.dtype == np.int64
            assert np.all(np.diff(batch) > 0)
            assert batch.size == 0 or (batch[0] >= 0 and batch[-1] < sampler.dataset_size)

    def test_any_step_can_be_asked_for_at_any_time(self, sampler: Sampler) -> None:
        forward = [sampler.indices(KEY, step).tolist() for step in range(12)]
        backward = [sampler.indices(KEY, step).tolist() for step in reversed(range(12))]
        assert forward == backward[::-1]

    def test_describes_itself_in_public_json_values(self, sampler: Sampler) -> None:
        text = json.dumps(sampler.describe())
        assert KEY.hex() not in text
        assert json.loads(text)["adjacency"] == sampler.adjacency
        assert json.loads(text)["dataset_size"] == 103
        assert json.loads(text)["expected_batch_size"] == sampler.expected_batch_size

    def test_event_has_the_samplers_adjacency(self, sampler: Sampler) -> None:
        assert sampler.event(1.0, 7).adjacency is sampler.adjacency
        refused(ArgumentError, "steps=-1", sampler.event, 1.0, -1)
        refused(ArgumentError, "noise_multiplier=-1", sampler.event, -1.0, 7)

    def test_knows_whether_its_accounting_rests_on_one_order(self, sampler: Sampler) -> None:
        # Forked runs must keep an order that the event counts on, and must not keep coins that it calls fresh.
        assert sampler.keeps_order is not sampler.describe()["secret"]

    def test_no_batch_is_larger_than_the_hard_maximum(self, sampler: Sampler) -> None:
        sizes = [sampler.indices(KEY, step).size for step in range(30)]
        if sampler.max_batch_size is None:
            assert isinstance(sampler, PoissonSampler)
        elif isinstance(sampler, sampling.CyclicPoissonSampler):  # a whole group of 21 is rare at a rate of a half
            assert max(sizes) <= sampler.max_batch_size
        else:
            assert max(sizes) == sampler.max_batch_size

    @settings(max_examples=chosen(10, 300))
    @given(world_size=st.integers(1, 7), step=st.integers(0, 40))
    def test_the_shares_of_all_processes_join_to_the_batch(self, sampler: Sampler, world_size: int, step: int) -> None:
        shares = [shard(sampler, rank, world_size).indices(KEY, step) for rank in range(world_size)]
        assert np.concatenate(shares).tolist() == sampler.indices(KEY, step).tolist()
        assert max(share.size for share in shares) - min(share.size for share in shares) <= 1

    def test_settings_cannot_be_changed(self, sampler: Sampler) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            sampler.dataset_size = 5  # type: ignore[misc]

    def test_refuses_bad_steps(self, sampler: Sampler) -> None:
        for bad in (-1, 2**32 - 1):
            refused(ArgumentError, "step=", sampler.indices, KEY, bad)


# ------------------------------------------------------------------------------------------------------------- Poisson


@given(st.integers(1, 10**12), st.floats(1e-9, 1))
def test_rate_is_rounded_down_to_the_coins_there_are(dataset_size: int, share: float) -> None:
    batch_size = max(share * dataset_size, 1e-9 * dataset_size)
    sampler = PoissonSampler(dataset_size=dataset_size, batch_size=batch_size)
    wanted = Fraction(batch_size) / dataset_size
    assert 0 <= wanted - Fraction(sampler.sample_rate) < Fraction(1, 2**32)
    assert (Fraction(sampler.sample_rate) * 2**32).denominator == 1
    assert sampler.event(1.0, 3) == PoissonSampledGaussian(sampler.sample_rate, 1.0, 3)


def test_takes_exactly_the_words_below_the_rate() -> None:
    sampler = PoissonSampler(dataset_size=5000, sample_rate=0.3)
    words = load_backend("numpy").words(KEY, 11, Stream.SAMPLING, 0, 5000)
    assert sampler.indices(KEY, 11).tolist() == np.flatnonzero(words < math.floor(0.3 * 2**32)).tolist()


def test_batch_sizes_are_binomial_and_steps_and_examples_independent() -> None:
    sampler = PoissonSampler(dataset_size=200, sample_rate=0.1)
    rows = np.zeros((1500, 200))
    for step in range(1500):
        rows[step, sampler.indices(KEY, step)] = 1
    sizes = rows.sum(axis=1)
    edges = [-1, 14, 17, 19, 21, 24, 200]
    expected = 1500 * np.diff(stats.binom(200, 0.1).cdf(edges))
    observed, _ = np.histogram(sizes, bins=np.array(edges) + 0.5)
    assert stats.chisquare(observed, expected).pvalue > 1e-4
    pairs = [(rows[:-1], rows[1:]), (rows[:, :-1], rows[:, 1:])]
    for left, right in pairs:  # neighboring steps, then neighboring examples
        both = (left * right).mean()
        assert abs(both - 0.01) < 5 * math.sqrt(0.01 * 0.99 / left.size)


def test_a_shard_is_one_of_them_and_nothing_that_is_accounted() -> None:
    sampler = PoissonSampler(dataset_size=10, batch_size=3)
    assert not hasattr(shard(sampler, 0, 2), "event")
    assert shard(sampler, 0, 2).units(KEY, 0) is None
    refused(ArgumentError, "rank=2: must be less than world_size=2", shard, sampler, 2, 2)
    refused(ArgumentError, "world_size=0", shard, sampler, 0, 0)
    refused(ArgumentTypeError, "must be a sampler from dpcore", shard, shard(sampler, 0, 2), 0, 2)


def test_batch_size_stays_the_denominator_as_given() -> None:
    sampler = PoissonSampler(dataset_size=60_000, batch_size=256)
    assert sampler.expected_batch_size == 256.0
    assert sampler.steps_per_epoch == 235
    assert PoissonSampler(dataset_size=60_000, sample_rate=0.01).steps_per_epoch == 100
    assert PoissonSampler(dataset_size=60_000, sample_rate=0.01).expected_batch_size == pytest.approx(600)
    # A stored description gives the same sampler back.
    again = PoissonSampler(dataset_size=60_000, batch_size=sampler.batch_size, sample_rate=sampler.sample_rate)
    assert again == sampler


def test_poisson_refuses() -> None:
    refused(ArgumentError, r"give batch_size .* or sample_rate", PoissonSampler, dataset_size=10)
    refused(ArgumentError, "contradicts batch_size=5", PoissonSampler, dataset_size=10, batch_size=5, sample_rate=0.4)
    with pytest.raises(ArgumentError, match="batch_size=11: must be at most dataset_size=10"):
        PoissonSampler(dataset_size=10, batch_size=11)
    refused(ArgumentError, r"at least 2\^-32", PoissonSampler, dataset_size=10, sample_rate=1e-10)
    for bad in (0, -0.1, 1.1, math.nan, math.inf):
        refused(ArgumentError, "sample_rate=", PoissonSampler, dataset_size=10, sample_rate=bad)
    for bad in (0, -1, math.nan):
        refused(ArgumentError, "batch_size=", PoissonSampler, dataset_size=10, batch_size=bad)
    refused(ArgumentError, "dataset_size=0", PoissonSampler, dataset_size=0, batch_size=1)


# ---------------------------------------------------------------------------------------------------------- fixed size


def test_all_subsets_come_equally_often() -> None:
    sampler = FixedSizeSampler(dataset_size=5, batch_size=2)
    counts = Counter(tuple(sampler.indices(KEY, step).tolist()) for step in range(4000))
    assert set(counts) == set(itertools.combinations(range(5), 2))
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


def test_fixed_size_event_is_relative_to_twice_the_clip_norm() -> None:
    sampler = FixedSizeSampler(dataset_size=100, batch_size=7)
    assert sampler.event(1.0, 9) == FixedSizeSampledGaussian(100, 7, 0.5, 9)
    assert sampler.adjacency is Adjacency.REPLACE_ONE
    assert sampler.steps_per_epoch == 15
    assert {sampler.indices(KEY, step).size for step in range(20)} == {7}


@pytest.mark.parametrize("kind", [FixedSizeSampler, FixedOrderSampler, sampling.ShuffledSampler])
def test_fixed_sizes_refuse(kind: type) -> None:
    refused(ArgumentError, "batch_size=11: must be at most dataset_size=10", kind, dataset_size=10, batch_size=11)
    refused(ArgumentError, "batch_size=0", kind, dataset_size=10, batch_size=0)
    refused(ArgumentTypeError, r"batch_size=2\.5", kind, dataset_size=10, batch_size=2.5)


# --------------------------------------------------------------------------------------------------------- fixed order


def brute_patterns(sampler: Sampler, steps: int) -> set[tuple[int, ...]]:
    """The steps of every example that is used, by asking every step."""
    used: dict[int, list[int]] = {}
    for step in range(steps):
        for i in sampler.indices(KEY, step).tolist():
            used.setdefault(i, []).append(step)
    return set(map(tuple, used.values()))


def brute_participations(sampler: Sampler, steps: int) -> int:
    return max(Counter(i for step in range(steps) for i in sampler.indices(KEY, step).tolist()).values(), default=0)


@given(st.integers(1, 40), st.data(), st.booleans(), st.booleans())
def test_fixed_order_is_one_partition_for_every_epoch(
    dataset_size: int, data: st.DataObject, shuffle: bool, drop_last: bool
) -> None:
    batch_size = data.draw(st.integers(1, dataset_size))
    sampler = FixedOrderSampler(dataset_size=dataset_size, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    epoch = sampler.steps_per_epoch
    first = [sampler.indices(KEY, step).tolist() for step in range(epoch)]
    for number in (1, 2, 1000):
        assert [sampler.indices(KEY, number * epoch + step).tolist() for step in range(epoch)] == first
    used = list(itertools.chain(*first))
    assert len(set(used)) == len(used) == (dataset_size // batch_size * batch_size if drop_last else dataset_size)
    assert all(len(batch) == batch_size for batch in first[:-1])
    if not shuffle:
        assert used == list(range(len(used)))
    steps = data.draw(st.integers(0, 3 * epoch))
    assert sampler.participations(steps) == brute_participations(sampler, steps)
    assert sampler.event(1.5, steps) == Gaussian(1.5, brute_participations(sampler, steps), Adjacency.ZERO_OUT)
    assert sampler.expected_batch_size == batch_size
    patterns = sampler.patterns(steps)
    assert all(pattern.dtype == np.int64 for pattern in patterns)
    assert sorted(map(tuple, patterns)) == sorted(brute_patterns(sampler, steps))


# ------------------------------------------------------------------------------------------------------- fixed batches

BATCH_LISTS = st.lists(st.lists(st.integers(0, 8), unique=True, max_size=5), min_size=1, max_size=6).filter(any)


@given(BATCH_LISTS, st.integers(0, 20))
def test_fixed_batches_count_the_most_used_example(batches: list[list[int]], steps: int) -> None:
    sampler = FixedBatches([np.array(batch, np.int32) for batch in batches])
    assert [sampler.indices(KEY, step).tolist() for step in range(len(batches))] == [sorted(b) for b in batches]
    assert sampler.participations(steps) == brute_participations(sampler, steps)
    assert sampler.event(1.0, steps) == Gaussian(1.0, brute_participations(sampler, steps), Adjacency.ZERO_OUT)
    assert sampler.dataset_size == 1 + max(itertools.chain(*batches))
    assert sampler.expected_batch_size == max(map(len, batches))
    assert sampler.max_batch_size == max(map(len, batches))
    patterns = sampler.patterns(steps)
    assert all(pattern.dtype == np.int64 for pattern in patterns)
    assert sorted(map(tuple, patterns)) == sorted(brute_patterns(sampler, steps))


def test_fixed_batches_are_told_apart_by_what_they_describe() -> None:
    """A resumed run compares descriptions: under other batches an example could take part more often than accounted."""
    lists = ([[0], [1], [2]], [[1], [0], [2]], [[0], [1, 2], []], [[0, 1], [2], []])
    said = [FixedBatches(batches, dataset_size=3, batch_size=1).describe() for batches in lists]
    assert len({each["batches_sha256"] for each in said}) == len(lists)
    assert FixedBatches([[0], [1], [2]], dataset_size=3, batch_size=1).describe() == said[0]


def test_fixed_batches_are_copied_and_read_only() -> None:
    mine = np.array([2, 0, 1])
    sampler = FixedBatches([mine], dataset_size=10, batch_size=4)
    mine[0] = 9
    assert sampler.indices(KEY, 0).tolist() == [0, 1, 2]
    assert (sampler.dataset_size, sampler.expected_batch_size) == (10, 4.0)
    assert sampler.max_batch_size == 3
    with pytest.raises(ValueError, match="read-only"):
        sampler.indices(KEY, 0)[0] = 5


def test_fixed_batches_refuse() -> None:
    refused(ArgumentError, r"batches\[1\]: index 3 occurs twice", FixedBatches, [[0], [3, 1, 3]])
    refused(ArgumentError, r"batches\[0\]: index -1", FixedBatches, [[-1]])
    refused(ArgumentError, "index 7 lies outside of dataset_size=7", FixedBatches, [[7]], dataset_size=7)
    refused(ArgumentTypeError, r"batches\[0\]: must hold integer indices", FixedBatches, [[0.5]])
    refused(ArgumentTypeError, r"batches\[0\]: must hold integer indices", FixedBatches, [[True, False]])
    refused(ArgumentError, r"batches\[0\]: must be one-dimensional", FixedBatches, [[[0], [1]]])
    refused(ArgumentError, r"batches\[1\]: must be one-dimensional, not lists", FixedBatches, [[0], [[0], [1, 2]]])
    for listless in (3, None, "abc"):
        refused(ArgumentTypeError, "must be a list of index arrays", FixedBatches, listless)
    for empty in ([], [[]]):
        refused(ArgumentError, "at least one batch", FixedBatches, empty)
