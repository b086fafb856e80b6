"""Users as the unit of privacy: whose examples are drawn, and that one user's vectors are summed before the clip."""

import itertools
import json
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import dpcore
from dpcore import methods, sampling
from dpcore.accounting import Gaussian
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.mechanism.minimize import minimize
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedOrderSampler, UserSampler, draw, shard
from dpcore.sampling.users import _chosen, _kept, portions
from dpcore.spec.keys import RunKeys
from dpcore.statement.build import state
from tests.refused import refused

KEY = bytes(range(32))
USERS = np.random.default_rng(0).permutation(np.repeat(np.arange(7), [1, 5, 2, 3, 1, 9, 4]))
INNER = {
    "poisson": sampling.PoissonSampler(dataset_size=7, sample_rate=0.6),
    "truncated": sampling.TruncatedPoissonSampler(dataset_size=7, batch_size=3, max_batch_size=3),
    "fixed size": sampling.FixedSizeSampler(dataset_size=7, batch_size=3),
    "fixed order": FixedOrderSampler(dataset_size=7, batch_size=3),
    "shuffled": sampling.ShuffledSampler(dataset_size=7, batch_size=3),
    "cyclic": sampling.CyclicPoissonSampler(dataset_size=7, batch_size=2, groups=2),
    "allocated": sampling.RandomAllocationSampler(dataset_size=7, batch_size=3),
}


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("most", [1, 3, 20])
def test_gives_the_examples_of_the_users_drawn_each_user_in_a_row(name: str, most: int) -> None:
    inner = INNER[name]
    sampler = UserSampler(inner, USERS, most)
    for step in (0, 5, 2, 9):
        drawn, batch, units = inner.indices(KEY, step), sampler.indices(KEY, step), sampler.units(KEY, step)
        assert (batch.dtype, units.dtype) == (np.int64, np.int64)
        assert len(set(batch.tolist())) == batch.size == units.sum()
        assert [user for user, _ in itertools.groupby(USERS[batch].tolist())] == drawn.tolist()
        assert units.tolist() == np.minimum(np.bincount(USERS)[drawn], most).tolist()
        for own in np.split(batch, np.cumsum(units)[:-1]) if units.size else []:
            assert np.all(np.diff(own) > 0)
        shares = [shard(sampler, rank, 3) for rank in range(3)]
        assert np.concatenate([share.indices(KEY, step) for share in shares]).tolist() == batch.tolist()
        for share in shares:  # no user is in two of them
            assert share.indices(KEY, step).size == share.units(KEY, step).sum()
    assert sampler.event(1.3, 9) == inner.event(1.3, 9)
    for member in ("dataset_size", "expected_batch_size", "steps_per_epoch", "max_batch_size", "keeps_order",
                   "adjacency"):  # fmt: skip
        assert getattr(sampler, member) == getattr(inner, member)
    assert sampler.example_count == 25


def test_which_examples_of_a_user_take_part_is_uniform_and_stays() -> None:
    inner = FixedOrderSampler(dataset_size=2, batch_size=2, shuffle=False)
    sampler = UserSampler(inner, [0, 1, 1, 0, 1, 1, 1], 2)
    counts: Counter[tuple[int, ...]] = Counter()
    for number in range(2000):
        key = bytes([number % 256, number // 256]) + bytes(30)
        batch = sampler.indices(key, 0).tolist()
        assert sampler.indices(key, 3).tolist() == batch
        assert batch[:2] == [0, 3]
        counts[tuple(batch[2:])] += 1
    assert set(counts) == set(itertools.combinations([1, 2, 4, 5, 6], 2))
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


def test_describes_what_a_user_is() -> None:
    sampler = UserSampler(INNER["poisson"], USERS, 3)
    said = json.loads(json.dumps(sampler.describe()))
    assert (said["unit"], said["dataset_size"], said["examples"], said["max_examples_per_user"]) == ("user", 7, 25, 3)
    assert said["users_sha256"] != UserSampler(INNER["poisson"], (USERS + 1) % 7, 3).describe()["users_sha256"]
    assert sampler.unit_of_privacy == "user"
    plan = Plan(methods.dp_sgd(lr=0.1, noise_multiplier=2.0), sampler, 5)
    statement = state(plan, 1e-5, steps_taken=5, keys=RunKeys.new(), backend="numpy")
    assert any("unit of privacy is one user" in caveat for caveat in statement.caveats)
    assert not any("one example" in caveat for caveat in statement.caveats)


# fmt: off
REFUSED = [
    (USERS, 0, ArgumentError, "max_examples_per_user=0"), (USERS, 1.5, ArgumentTypeError, "max_examples_per_user=1.5"),
    (USERS - 1, 1, ArgumentError, "has the user -1"), (["a", "b"], 1, ArgumentTypeError, "return_inverse=True"),
    (USERS + 1, 1, ArgumentError, "has the user 7; must be 0 to"), (USERS[:, None], 1, ArgumentError, "must be (n,)"),
    ([], 1, ArgumentError, "must be (n,)"), ([0, 1, 3, 4, 5, 6], 1, ArgumentError, "user 2 of the sampler's 7 has"),
    ([[0], [1, 2]], 1, ArgumentError, "one user for each example"),
    *((some, 1, ArgumentTypeError, "must be int") for some in (USERS.astype(float), [0, None, 1], [0, np.nan])),
    (np.ma.masked_less(USERS, 1), 1, ArgumentTypeError, "hides some"),
]
# fmt: on


@pytest.mark.parametrize(("users", "most", "error", "words"), REFUSED)
def test_refuses(users: Any, most: Any, error: type[Exception], words: str) -> None:
    refused(error, rf"^[^\n]*{re.escape(words)}[^\n]*\Z", UserSampler, INNER["poisson"], users, most)


def test_refuses_what_samples_no_users() -> None:
    for inner, words in ((UserSampler(INNER["poisson"], USERS, 1), "the users"), ("poisson", "sampler='poisson'")):
        refused(ArgumentTypeError, words, UserSampler, inner, USERS, 1)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 6))
def test_portions_hold_whole_users_or_a_part_of_one(units: list[int], most: int) -> None:
    found = list(portions(np.array(units, dtype=np.int64), most))
    starts = [start for start, *_ in found]
    assert starts == [0, *itertools.accumulate(stop - start for start, stop, *_ in found)][: len(starts)]
    together, begun = [], 0
    for start, stop, sizes, more in found:
        assert 0 < stop - start == sum(sizes) <= most
        if more or begun:
            assert len(sizes) == 1
        if more:
            begun += sizes[0]
            continue
        together += [begun + sizes[0], *sizes[1:]]
        begun = 0
    assert together == units
    assert begun == 0


def loop(gradients: np.ndarray, sampler: UserSampler, sampling: bytes, steps: int, clip: float) -> np.ndarray:
    """Users one after the other: their sum, clipped; without noise, at learning rate 1."""
    x = np.zeros(gradients.shape[1])
    for step in range(steps):
        total = np.zeros_like(x)
        for user in sampler.sampler.indices(sampling, step):
            own = [i for i in sampler.indices(sampling, step) if USERS[i] == user]
            vector = gradients[own].sum(0)
            norm = np.linalg.norm(vector)
            if np.isfinite(norm):
                total += vector * min(1.0, clip / norm)
        x -= total / sampler.expected_batch_size
    return x


@pytest.mark.parametrize("most", [1, 3, 20])
def test_minimize_clips_the_sum_of_a_users_vectors(most: int) -> None:
    gradients = np.random.default_rng(2).normal(size=(25, 4))
    gradients[11, 2] = np.inf  # the whole user contributes nothing then
    sampler = UserSampler(INNER["fixed order"], USERS, most)
    method = methods.dp_sgd(lr=1.0, noise_multiplier=1.0, max_grad_norm=0.7)
    result = minimize(
        lambda _, indices: gradients[indices], np.zeros(4), sampler, method, steps=6, noise=np.zeros((6, 4)), key=KEY,
        exact_key=True,
    )  # fmt: skip
    sampling = RunKeys.new(KEY, exact_key=True).sampling
    np.testing.assert_allclose(result.x, loop(gradients, sampler, sampling, 6, 0.7), rtol=1e-6)
    assert result.plan.event == Gaussian(1.0, 2, dpcore.accounting.Adjacency.ZERO_OUT)


def test_one_user_moves_a_sum_by_at_most_the_clip_norm() -> None:
    """However many examples: with 20 of them, clipped one by one, it would be 20 times that."""
    gradients = np.random.default_rng(3).normal(size=(25, 4)) * 100
    sampler = UserSampler(FixedOrderSampler(dataset_size=7, batch_size=7), USERS, 20)
    method = methods.disk(lr=1.0, noise_multiplier=1.0, max_grad_norm=0.5, clipping="standard")

    def end(scale: float) -> np.ndarray:
        changed = gradients.copy()
        changed[USERS == 5] *= scale
        return minimize(lambda _, i: changed[i], np.zeros(4), sampler, method, steps=1, noise=np.zeros((1, 4))).x

    moved = np.linalg.norm(end(1.0) - end(0.0)) * 7
    assert 0.49 < moved <= 0.5


def test_which_examples_of_a_user_take_part_shares_no_word_with_the_users_order(monkeypatch) -> None:
    """A fixed order has the same row: under one key the first users of an order would keep certain examples."""
    draw.permutation.cache_clear()
    _kept.cache_clear()
    asked = []
    row_words = draw.row_words

    def watched(key: bytes, row: int) -> draw.Words:
        asked.append((key, row))
        return row_words(key, row)

    monkeypatch.setattr(draw, "row_words", watched)
    key = bytes(range(1, 33))
    sampler = UserSampler(FixedOrderSampler(dataset_size=5, batch_size=2), [i % 5 for i in range(20)], 2)
    for step in range(3):
        sampler.indices(key, step)
    assert len(asked) == len(set(asked)) == 2
    assert {row for _, row in asked} == {draw.SHUFFLE_ROW}


def test_choices_within_users_are_exactly_uniform_also_where_keys_collide() -> None:
    """All draws of small keys for users of 3 and 2 examples, of which 1 each takes part."""
    examples, counts = np.arange(5), np.array([3, 2])
    found = Counter()
    for keys in itertools.product(range(3), repeat=5):
        chosen = _chosen(np.array(keys, np.uint64), examples, counts, 1)
        assert (chosen is None) == (len(set(keys[:3])) < 3 or keys[3] == keys[4])
        if chosen is not None:
            found[tuple(chosen.tolist())] += 1
    assert set(found) == set(itertools.product(range(3), (3, 4)))
    assert len(set(found.values())) == 1
