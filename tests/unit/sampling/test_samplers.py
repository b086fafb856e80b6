"""The samplers: who takes part, how often, by name and by draw, and what is accounted for it."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import comb, factorial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcore import methods, sampling
from dpcore.accounting import Adjacency, FixedSizeSampledGaussian, Gaussian, PoissonSampledGaussian
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError
from dpcore.plan.plan import Plan
from dpcore.sampling import (
    FixedBatches,
    FixedOrderSampler,
    FixedSizeSampler,
    PoissonSampler,
    Sampler,
    UserSampler,
    draw,
    foreign,
    from_description,
    sampler,
    shard,
)
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
    sampling.RandomAllocationSampler(dataset_size=103, batch_size=10),
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
        allocated = isinstance(sampler, sampling.RandomAllocationSampler)  # in secret, once for each epoch
        assert sampler.keeps_order is (allocated or not sampler.describe()["secret"])

    def test_no_batch_is_larger_than_the_hard_maximum(self, sampler: Sampler) -> None:
        sizes = [sampler.indices(KEY, step).size for step in range(30)]
        if sampler.max_batch_size is None:
            assert isinstance(sampler, (PoissonSampler, sampling.RandomAllocationSampler))
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
    half = {"dataset_size": 2**32, "batch_size": 2, "sample_rate": 2.0**-32}  # one coin's word of two
    refused(ArgumentError, "contradicts batch_size=2", PoissonSampler, **half)
    with pytest.raises(ArgumentError, match="batch_size=11: must be at most dataset_size=10"):
        PoissonSampler(dataset_size=10, batch_size=11)
    refused(ArgumentError, r"at least 2\^-32", PoissonSampler, dataset_size=10, sample_rate=1e-10)
    for bad in (0, -0.1, 1.1, math.nan, math.inf):
        refused(ArgumentError, "sample_rate=", PoissonSampler, dataset_size=10, sample_rate=bad)
    for bad in (0, -1, math.nan):
        refused(ArgumentError, "batch_size=", PoissonSampler, dataset_size=10, batch_size=bad)
    refused(ArgumentError, "dataset_size=0", PoissonSampler, dataset_size=0, batch_size=1)


# ---------------------------------------------------------------------------------------------------------- fixed size


def test_takes_the_subset_of_the_steps_own_words() -> None:
    """Which are all equally likely, as is counted below."""
    sampler = FixedSizeSampler(dataset_size=50, batch_size=20)
    assert sampler.indices(KEY, 11).tolist() == draw.subset(draw.row_words(KEY, 11), 50, 20).tolist()


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
    refused(ArgumentError, "index 7 is outside of dataset_size=7", FixedBatches, [[7]], dataset_size=7)
    refused(ArgumentTypeError, r"batches\[0\]: must be integer indices", FixedBatches, [[0.5]])
    refused(ArgumentTypeError, r"batches\[0\]: must be integer indices", FixedBatches, [[True, False]])
    refused(ArgumentError, r"batches\[0\]: must be one-dimensional", FixedBatches, [[[0], [1]]])
    refused(ArgumentError, r"batches\[1\]: must be one-dimensional, not lists", FixedBatches, [[0], [[0], [1, 2]]])
    for listless in (3, None, "abc"):
        refused(ArgumentTypeError, "must be a list of index arrays", FixedBatches, listless)
    for empty in ([], [[]]):
        refused(ArgumentError, "at least one batch", FixedBatches, empty)


# Samplers by name: one table for configurations, the command line, the PyTorch edge and stored statements.


SIZES: dict[str, Any] = {"dataset_size": 110, "batch_size": 10}
NAMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "poisson": (PoissonSampler, {}),
    "truncated-poisson": (sampling.TruncatedPoissonSampler, {"max_batch_size": 15}),
    "fixed-size": (sampling.FixedSizeSampler, {}),
    "fixed-order": (sampling.FixedOrderSampler, {"shuffle": False, "drop_last": True}),
    "shuffled": (sampling.ShuffledSampler, {"drop_last": True}),
    "cyclic-poisson": (sampling.CyclicPoissonSampler, {"groups": 4, "shuffle": False}),
    "random-allocation": (sampling.RandomAllocationSampler, {}),
}


@dataclass(frozen=True, init=False)
class Mine(PoissonSampler):
    """Not the library's."""


@pytest.mark.parametrize("name", NAMED)
def test_a_sampler_is_made_by_name_and_again_from_what_it_says(name: str) -> None:
    assert set(NAMED) == set(sampling.NAMES)
    kind, settings = NAMED[name]
    expected = kind(**SIZES, **settings)
    for spelling in (name, name.replace("-", "_"), name.replace("-", " ")):
        assert sampler(spelling, dataset_size=110, batch_size=10.0, **settings, sample_rate=None) == expected
    assert from_description(json.loads(json.dumps(expected.describe()))) == expected
    assert foreign(expected) is None
    users = UserSampler(expected, [i % 110 for i in range(200)], 2)
    again = from_description(json.loads(json.dumps(users.describe())))
    assert again == users
    assert again.describe() == users.describe()
    assert foreign(again) is foreign(users) is None


@pytest.mark.parametrize(("name", "given", "said"), [
    ("poison", SIZES, "did you mean 'poisson'"), ("cyclic-poisson", SIZES, "groups=None: must be given"),
    ("poisson", {**SIZES, "groups": 3}, "groups=3: is only for sampling 'cyclic-poisson', not 'poisson'"),
    ("shuffled", {**SIZES, "sample_rate": 0.1}, "is only for sampling 'poisson' or 'truncated-poisson'"),
    ("fixed-size", {"dataset_size": 110}, "batch_size=None: must be given"),
    ("poisson", {"dataset_size": 110}, "batch_size=None: must be given"),
])  # fmt: skip
def test_what_does_not_fit_the_name_is_refused(name: str, given: dict[str, Any], said: str) -> None:
    refused(ArgumentError, said, sampler, name, **given)


def test_batches_of_fixed_size_have_a_whole_number_of_examples() -> None:
    refused(ArgumentTypeError, r"batch_size=10\.5", sampler, "fixed-order", dataset_size=110, batch_size=10.5)
    assert sampler("poisson", dataset_size=110, batch_size=10.5).expected_batch_size == 10.5


def test_a_description_that_does_not_hold_all_makes_no_sampler() -> None:
    described = PoissonSampler(**SIZES).describe()
    assert from_description(FixedBatches([[0, 1]]).describe()) is None
    assert from_description({**described, "sampler": "mine"}) is None
    assert from_description({"sampler": 3}) is None
    with pytest.raises(DataError, match="lacks"):
        from_description({name: value for name, value in described.items() if name != "sample_rate"})
    with pytest.raises(DataError, match=r"cannot exist: sample_rate=.* contradicts"):
        from_description({**described, "expected_batch_size": 11})


def test_whose_a_sampler_is_goes_by_its_class() -> None:
    assert foreign(Mine(**SIZES)) is Mine
    assert foreign(UserSampler(Mine(**SIZES), [i % 110 for i in range(200)], 2)) is Mine


def test_an_object_that_lacks_a_member_is_no_sampler() -> None:
    class Half:
        """Draws, and does not say what correlated noise costs under it."""

        def __init__(self) -> None:
            whole = PoissonSampler(**SIZES)
            for name in ("dataset_size", "expected_batch_size", "indices", "event", "describe", "keeps_order"):
                setattr(self, name, getattr(whole, name))

    for value in (Half(), PoissonSampler, None):
        with pytest.raises(ArgumentTypeError, match=r"must be a sampler from dpcore\.sampling"):
            Plan(methods.dp_sgd(lr=0.1, noise_multiplier=1.0), value, 3)  # type: ignore[arg-type]


# Pinned index sets: a run that is resumed next year must meet the same batches (design: the stream is a contract).


def users(*, users: int, batch_size: float, examples: int, max_examples_per_user: int) -> UserSampler:
    """A user for each of the first examples, and the others spread unevenly."""
    owners = [i * i % users if i >= users else i for i in range(examples)]
    return UserSampler(PoissonSampler(dataset_size=users, batch_size=batch_size), owners, max_examples_per_user)


PINNED: dict[str, Callable[..., Sampler]] = {
    "poisson": PoissonSampler, "truncated_poisson": sampling.TruncatedPoissonSampler,
    "cyclic_poisson": sampling.CyclicPoissonSampler, "fixed_size": sampling.FixedSizeSampler,
    "fixed_order": sampling.FixedOrderSampler, "shuffled": sampling.ShuffledSampler,
    "random_allocation": sampling.RandomAllocationSampler, "users poisson": users,
}  # fmt: skip
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "sampling.json").read_text())


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['sampler']}-{row['step']}-{row['key'][:4]}")
def test_index_sets(row: dict[str, object]) -> None:
    sampler = PINNED[str(row["sampler"])](**row["settings"])  # type: ignore[arg-type]
    batch = sampler.indices(bytes.fromhex(str(row["key"])), row["step"])  # type: ignore[arg-type]
    assert batch[:8].tolist() == row["first"]
    assert batch.size == row["size"]
    assert hashlib.sha256(batch.astype("<i8").tobytes()).hexdigest() == row["sha256"]
    assert batch.dtype == np.int64


# The draws themselves: exactly unbiased, by enumeration, also where sort keys collide.


WORD_MAX = 2**32 - 1


def source(values: list[int]) -> draw.Words:
    words = np.array(values, np.uint32)
    return lambda start, size: words[start : start + size]


def test_a_coin_lands_below_its_threshold_only() -> None:
    words = source([0, 9, 10, 11, WORD_MAX])
    assert draw.coins(words, 10, 0, 5).tolist() == [0, 1]
    assert draw.coins(words, 2**32, 0, 5).tolist() == [0, 1, 2, 3, 4]
    assert draw.coins(words, WORD_MAX, 0, 5).tolist() == [0, 1, 2, 3]
    assert draw.coins(words, 11, 1, 3).tolist() == [1, 2]
    assert draw.coins(words, 11, 2, 2).size == 0


@pytest.mark.parametrize(("population", "size", "alphabet"), [(3, 1, 4), (4, 2, 3), (5, 3, 3), (4, 4, 2)])
def test_every_subset_is_equally_likely_given_that_no_collision_matters(population: int, size: int, alphabet: int):
    counts = Counter(
        tuple(found.tolist())
        for keys in itertools.product(range(alphabet), repeat=population)
        if (found := draw.smallest(np.array(keys, np.uint64), size)) is not None
    )
    assert len(counts) == comb(population, size)
    assert len(set(counts.values())) == 1


@pytest.mark.parametrize(("population", "alphabet"), [(2, 3), (3, 4), (4, 5)])
def test_every_order_is_equally_likely_given_no_collision(population: int, alphabet: int) -> None:
    counts = Counter(
        tuple(found.tolist())
        for keys in itertools.product(range(alphabet), repeat=population)
        if (found := draw.order(np.array(keys, np.uint64))) is not None
    )
    assert len(counts) == factorial(population)
    assert len(set(counts.values())) == 1


def test_a_collision_that_matters_throws_the_whole_draw_away() -> None:
    # First draw: sort keys (1, 1, 2), so a subset of one is open; second draw: (3, 2, 1).
    words = source([0, 0, 0, 1, 1, 2, 0, 0, 0, 3, 2, 1])
    assert draw.subset(words, 3, 1).tolist() == [2]
    # With two to take, (1, 1) are both in and nothing is open.
    assert draw.subset(words, 3, 2).tolist() == [0, 1]


def test_sort_keys_use_all_64_bits() -> None:
    # The first word is the high half: (2, 0) < (1, 5) by the low half alone, but not as a whole.
    words = source([2, 1, 0, 5])
    assert draw.subset(words, 2, 1).tolist() == [1]
    assert draw.subset(source([1, 1, 7, 3]), 2, 1).tolist() == [1]


def test_permutation_is_one_and_cannot_be_changed() -> None:
    order = draw.permutation(KEY, 100)
    assert sorted(order.tolist()) == list(range(100))
    assert order.tolist() != list(range(100))
    assert draw.permutation(KEY, 100) is order
    assert draw.permutation(bytes(32), 100).tolist() != order.tolist()
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 1


def test_reads_its_own_stream_and_row() -> None:
    words = draw.row_words(KEY, 7)(10, 20)
    backend = load_backend("numpy")
    assert words.tolist() == backend.words(KEY, 7, Stream.SAMPLING, 10, 20).tolist()
    assert words.tolist() != backend.words(KEY, 7, Stream.GRADIENT, 10, 20).tolist()
    assert words.tolist() != backend.words(KEY, 8, Stream.SAMPLING, 10, 20).tolist()


def test_refuses_bad_keys_and_steps() -> None:
    refused(ArgumentError, "key of 3 bytes", draw.row_words, b"abc", 0)
    refused(ArgumentTypeError, "key of type str", draw.row_words, "a" * 32, 0)
    refused(ArgumentError, "step=-1", draw.check_step, -1)
    refused(ArgumentError, "the row kept for the shuffle", draw.check_step, 2**32 - 1)
    refused(ArgumentTypeError, r"step=0\.5", draw.check_step, 0.5)
    assert draw.check_step(2**32 - 2) == 2**32 - 2


def test_every_attempt_has_words_of_its_own() -> None:
    words = draw.row_words(KEY, 3)
    keys = draw.sort_keys(words, 5)
    for attempt in range(3):
        high, low = words(10 * attempt, 5).astype(np.uint64), words(10 * attempt + 5, 5).astype(np.uint64)
        assert next(keys).tolist() == ((high << np.uint64(32)) + low).tolist()
