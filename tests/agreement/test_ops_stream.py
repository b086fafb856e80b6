"""Words and normals: Triton's kernels against the NumPy reference."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import assert_agree, few, grids, keys, noise_rows, noise_streams, rngs, sizes, starts

import dpcore_numpy as reference
from dpcore.errors import ArgumentError
from dpcore.spec import rounded_normal as law
from tests.refused import refused
from tests.spec.scalar_normal import drawn as scalar
from tests.spec.scalar_normal import words_of

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

KEY = bytes(range(32))


@few
@given(keys, noise_rows, noise_streams, starts, sizes, st.sampled_from([0, 1, 2, 17, 37]), rngs)
@example(KEY, 2**32 - 1, 2, 2**34 - 9000, 9000, 1, "chacha20")
@example(KEY, 2**31, 1, 2**34 - 9000, 9000, 2**31, "philox")
def test_words_are_the_same_bits(
    backend: Any, key: bytes, row: int, stream: int, start: int, size: int, part: int, rng: str
):
    got = backend.to_numpy(backend.words(key, row, stream, start, size, part=part, rng=rng))
    assert_agree("words", got.view(np.uint32), reference.words(key, row, stream, start, size, part=part, rng=rng))


def test_words_reach_the_end_of_the_stream(backend: Any) -> None:
    got = backend.to_numpy(backend.words(KEY, 0, 0, 2**36 - 5, 5)).view(np.uint32)
    np.testing.assert_array_equal(got, reference.words(KEY, 0, 0, 2**36 - 5, 5))
    refused(ArgumentError, "start", backend.words, KEY, 0, 0, 2**36 - 5, 6)
    refused(ArgumentError, "key of 31 bytes", backend.words, KEY[:31], 0, 0, 0, 1)


@few
@given(keys, noise_rows, noise_streams, starts, sizes, grids, rngs)
def test_normals_agree(
    backend: Any, key: bytes, row: int, stream: int, start: int, size: int, bits: int, rng: str
) -> None:
    got = backend.to_numpy(backend.normal(key, row, stream, start, size, bits=bits, rng=rng))
    assert_agree("normal", got, reference.normal(key, row, stream, start, size, bits=bits, rng=rng))


@few
@given(keys, noise_rows, starts, st.integers(0, 9000), st.integers(0, 9000), grids)
def test_any_cut_gives_the_same_bits(
    backend: Any, key: bytes, row: int, start: int, left: int, right: int, bits: int
) -> None:
    whole, first, second = (
        backend.to_numpy(backend.normal(key, row, 0, begin, size, bits=bits, rng="philox"))
        for begin, size in ((start, left + right), (start, left), (start + left, right))
    )
    np.testing.assert_array_equal(whole, np.concatenate([first, second]))


GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "stream.json").read_text())["normals"]


@pytest.mark.parametrize("rng", ["chacha20", "philox"])
def test_golden_integers_of_the_rest(backend: Any, rng: str) -> None:
    """One element in 22,000 is drawn by rejection; some of these take more than one attempt."""
    cases = [case for case in GOLDEN if case["rng"] == rng and case["attempts"]]
    assert len(cases) > 10
    (place,) = {(bytes.fromhex(case["key"]), case["row"], case["stream"]) for case in cases}
    # All of one program, or some, in one call; in the interpreter a program is 65,536 elements.
    for start in range(0, 2**18, 2**16):
        inside = [case for case in cases if start <= case["element"] < start + 2**16]
        if inside:
            got = backend.to_numpy(backend.normal(*place, start, 2**16, rng=rng))
            for case in inside:
                assert got[case["element"] - start] * 2.0**36 == case["integer of 36 bits"]
            if rng == "chacha20":
                break


@pytest.fixture
def many_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every fourth column stands for the rest alone: several elements of a block are drawn by rejection."""
    noises = [import_module(f"dpcore_{name}.noise") for name in ("numpy", "torch", "triton")]
    columns = law.tables().columns.copy()
    columns[::4] = law.REST
    tables = law.tables()._replace(columns=columns)
    for module in (law, *noises[:2]):
        monkeypatch.setattr(module, "tables", lambda: tables)
    for cached in (noises[1]._columns, noises[2].tables_on):
        cached.cache_clear()
    yield
    for cached in (noises[1]._columns, noises[2].tables_on):
        cached.cache_clear()


@pytest.mark.usefixtures("many_of_the_rest")
def test_several_elements_of_a_block_are_drawn_by_rejection(backend: Any) -> None:
    drawn = reference.words(KEY, 4, 0, 0, 4096, rng="philox")
    of_rest = (drawn.reshape(16, 256) % 4 == 0).sum(axis=0)
    assert of_rest.max() > 6
    got = backend.to_numpy(backend.normal(KEY, 4, 0, 0, 4500, rng="philox"))
    np.testing.assert_array_equal(got, reference.normal(KEY, 4, 0, 0, 4500, rng="philox"))
    for element in (0, 256, 4095):
        words = words_of(KEY, 4, element)
        assert got[element] * 2.0**36 == scalar(words, element)
