"""The draws themselves: exactly unbiased, by enumeration, also where sort keys collide."""

from __future__ import annotations

import itertools
from collections import Counter
from math import comb, factorial

import numpy as np
import pytest

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.sampling import draw
from dpcore.spec.stream import Stream
from tests.refused import refused

KEY = bytes(range(32))
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
    from dpcore.spec.backends import load_backend

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
