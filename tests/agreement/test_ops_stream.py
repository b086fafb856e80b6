"""Words and normals: Triton's kernels against the NumPy reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import assert_agree, few, keys, noise_rows, noise_streams, rngs, sizes, starts

import dpcore_numpy as reference
from dpcore.errors import ArgumentError
from dpcore.spec.backends import load_backend
from tests.refused import refused

pytest.importorskip("triton")
BACKEND = "triton"


@pytest.fixture(scope="module", params=["triton", "torch"], autouse=True)
def other(request: pytest.FixtureRequest) -> Iterator[None]:
    """All tests run on both backends of tensors."""
    global BACKEND
    BACKEND = request.param
    yield
    BACKEND = "triton"


pytestmark = pytest.mark.usefixtures("poisoned_memory")

KEY = bytes(range(32))


@few
@given(keys, noise_rows, noise_streams, starts, sizes, st.booleans(), rngs)
@example(KEY, 2**32 - 1, 2, 2**34 - 9000, 9000, True, "chacha20")
@example(KEY, 2**31, 1, 2**34 - 9000, 9000, True, "philox")
def test_words_are_the_same_bits(key: bytes, row: int, stream: int, start: int, size: int, tail: bool, rng: str):
    backend = load_backend(BACKEND)
    got = backend.to_numpy(backend.words(key, row, stream, start, size, tail=tail, rng=rng))
    assert_agree("words", got.view(np.uint32), reference.words(key, row, stream, start, size, tail=tail, rng=rng))


def test_words_reach_the_end_of_the_stream() -> None:
    backend = load_backend(BACKEND)
    got = backend.to_numpy(backend.words(KEY, 0, 0, 2**36 - 5, 5)).view(np.uint32)
    np.testing.assert_array_equal(got, reference.words(KEY, 0, 0, 2**36 - 5, 5))
    refused(ArgumentError, "start", backend.words, KEY, 0, 0, 2**36 - 5, 6)
    refused(ArgumentError, "key of 31 bytes", backend.words, KEY[:31], 0, 0, 0, 1)


@few
@given(keys, noise_rows, noise_streams, starts, sizes, rngs)
def test_normals_agree(key: bytes, row: int, stream: int, start: int, size: int, rng: str) -> None:
    backend = load_backend(BACKEND)
    got = backend.to_numpy(backend.normal(key, row, stream, start, size, rng=rng))
    assert_agree("normal", got, reference.normal(key, row, stream, start, size, rng=rng))


@few
@given(keys, noise_rows, starts, st.integers(0, 9000), st.integers(0, 9000), rngs)
def test_any_cut_gives_the_same_bits(key: bytes, row: int, start: int, left: int, right: int, rng: str) -> None:
    backend = load_backend(BACKEND)
    whole, first, second = (
        backend.to_numpy(backend.normal(key, row, 0, begin, size, rng=rng))
        for begin, size in ((start, left + right), (start, left), (start + left, right))
    )
    np.testing.assert_array_equal(whole, np.concatenate([first, second]))


@pytest.mark.parametrize(("rng", "row"), [("chacha20", 10), ("philox", 4)])
def test_the_tail_is_refined(rng: str, row: int) -> None:
    """One element in two million lies there: rows that have two of them, or a kernel without the tail would pass."""
    backend = load_backend(BACKEND)
    drawn = reference.words(KEY, row, 0, 0, 2**20, rng=rng).reshape(-1, 16, 256)
    tile, pair, lane = np.nonzero(drawn[:, 0::2] < 4096)
    assert tile.size == 2
    for base in (tile * 4096 + pair * 512 + lane).tolist():
        for element in (base, base + 256):
            got = backend.to_numpy(backend.normal(KEY, row, 0, element, 1, rng=rng))
            definition = reference.normal(KEY, row, 0, element, 1, dtype="float64", rng=rng)
            np.testing.assert_allclose(got, definition, rtol=8 * 2.0**-23)


def test_float64_normals_are_refused() -> None:
    if BACKEND == "torch":
        pytest.skip("takes float64, as the reference does")
    with pytest.raises(ArgumentError, match=r"dtype='float64': must be 'float32'.*set_backend\('numpy'\)"):
        load_backend(BACKEND).normal(KEY, 0, 0, 0, 1, dtype="float64")
