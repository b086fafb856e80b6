"""Unbiased draws from the secret stream: coins, subsets and orders.

Word(row, element) is uniform on 32 bits (ChaCha20; dpcore.spec.stream). Sampling reads the stream SAMPLING under the
run's own sampling key; the row is the step, or the epoch for a sampler that draws once an epoch and never by step. The
last row, 2^32 - 1, belongs to the one shuffle before a run, so steps end before it.

Subsets and orders give each example a 64-bit sort key made of two words. If sort keys collide in a way that matters,
the **whole** draw is discarded and the next words of the row are taken. Given that no collision matters, the joint
distribution of the keys is still invariant under every permutation of the examples, so every subset (every order) is
equally likely, exactly. Patching a single collision instead would break that symmetry.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError
from dpcore.spec import validate
from dpcore.spec.backends import load_backend
from dpcore.spec.stream import MAX_ROW, Stream, check_key

SHUFFLE_ROW = MAX_ROW
_BLOCK = 1 << 20

Indices = npt.NDArray[np.int64]
Words = Callable[[int, int], npt.NDArray[np.uint32]]
SortKeys = npt.NDArray[np.uint64]


def check_step(step: int) -> int:
    """Return the step if it is one: 0 <= step < 2^32 - 1."""
    result = validate.integer(step=step, minimum=0)
    if result >= SHUFFLE_ROW:
        raise ArgumentError(f"step={step!r}: must be less than {SHUFFLE_ROW}, the row kept for the shuffle")
    return result


def row_words(key: bytes, row: int) -> Words:
    """Return (start, size) -> words of one row, uint32. The same bits on every backend, so the reference serves all."""
    check_key(key)
    words = load_backend("numpy").words
    return lambda start, size: np.asarray(words(key, row, Stream.SAMPLING, start, size), dtype=np.uint32)


def after(words: Words, used: int) -> Words:
    """Return the words of a row from element `used` on: fresh ones, whatever the first `used` decided."""
    return lambda start, size: words(used + start, size)


def coins(words: Words, threshold: int, start: int, stop: int) -> Indices:
    """Return the i in [start, stop) with word(i) < threshold: each with probability threshold / 2^32, independently."""
    heads = [
        first + np.flatnonzero(words(first, min(_BLOCK, stop - first)).astype(np.uint64) < np.uint64(threshold))
        for first in range(start, stop, _BLOCK)
    ]
    return np.concatenate(heads).astype(np.int64) if heads else np.empty(0, np.int64)


def sort_keys(words: Words, size: int) -> Iterator[SortKeys]:
    """Yield fresh draws of `size` 64-bit keys: words i and size + i of attempt a, which starts at element 2 a size."""
    start = 0
    while True:
        pair = words(start, 2 * size).astype(np.uint64)
        yield (pair[:size] << np.uint64(32)) | pair[size:]
        start += 2 * size


def smallest(keys: SortKeys, size: int) -> Indices | None:
    """Return the sorted positions of the `size` smallest keys, or None if equal keys leave the choice open."""
    if size == keys.size:
        return np.arange(size, dtype=np.int64)
    chosen = np.argpartition(keys, size - 1)[:size]
    if np.count_nonzero(keys <= keys[chosen].max()) != size:
        return None
    return np.sort(chosen).astype(np.int64)


def order(keys: SortKeys) -> Indices | None:
    """Return the positions by increasing key, or None if any two keys are equal."""
    result = np.argsort(keys, kind="stable")
    ranked = keys[result]
    return None if np.any(ranked[1:] == ranked[:-1]) else result.astype(np.int64)


def subset(words: Words, population: int, size: int) -> Indices:
    """Return a uniformly random subset of [0, population) with `size` elements, sorted."""
    return next(found for keys in sort_keys(words, population) if (found := smallest(keys, size)) is not None)


@lru_cache(maxsize=4)
def permutation(key: bytes, size: int, row: int = SHUFFLE_ROW) -> Indices:
    """Return the one uniformly random order of [0, size) that belongs to a key and a row; read-only.

    Cached, since every step takes a slice of it. The cache has secrets, in the memory of a process that has the key
    anyway; it is never written.
    """
    words = row_words(key, row)
    result = next(found for keys in sort_keys(words, size) if (found := order(keys)) is not None)
    result.flags.writeable = False
    return result
