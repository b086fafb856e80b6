"""Norms and sums of gradients given as pairs: Triton's kernels against the NumPy reference in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import SPECIAL, assert_agree, few, fewer, floats, seeds, writable

import dpcore_numpy as reference
from dpcore.errors import ArgumentTypeError
from dpcore.spec.backends import load_backend

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

Arrays = Sequence[np.ndarray]

# Across the edges of tiles (32 rows and columns), of blocks of positions (16) and of what a product adds up (16).
examples = st.sampled_from([0, 1, 3, 17])
times = st.lists(st.sampled_from([0, 1, 2, 15, 18]), min_size=1, max_size=2)
widths = st.sampled_from([0, 1, 3, 16, 33])
point_weights = st.sampled_from([1.0, -1.0, 0.3, 1000.0, 0.0, 1e-30])
sizes = st.sampled_from([1, 5, 40])


def sent(values: Any) -> Any:
    """Arrays in the backend's memory; what is none stays as it is."""
    if isinstance(values, list):
        return [sent(value) for value in values]
    return load_backend("triton").from_numpy(values) if isinstance(values, np.ndarray) else values


def wide(values: Any) -> Any:
    """Arrays of numbers in float64, in which the reference is the definition."""
    if isinstance(values, list):
        return [wide(value) for value in values]
    return values.astype(np.float64) if isinstance(values, np.ndarray) and values.dtype == np.float32 else values


def absolute(values: Any) -> Any:
    """Absolute values of numbers, not of indices and sizes."""
    if isinstance(values, list):
        return [absolute(value) for value in values]
    numbers = isinstance(values, float) or (isinstance(values, np.ndarray) and values.dtype == np.float64)
    return abs(values) if numbers else values


def assert_norms_agree(operation: str, *arguments: Any, **options: Any) -> np.ndarray:
    """Hold Triton's norms to those of the reference in float64."""
    backend = load_backend("triton")
    got = getattr(backend, operation)(*map(sent, arguments), **{name: sent(value) for name, value in options.items()})
    got = backend.to_numpy(got)
    wider = {name: wide(value) for name, value in options.items()}
    expected = getattr(reference, operation)(*map(wide, arguments), **wider)
    assert got.dtype == np.float64
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    with np.errstate(over="ignore"):
        assert_agree(operation, got[finite].astype(np.float32), expected[finite].astype(np.float32))
    return got


def assert_sums_agree(operation: str, *arguments: Any, scale: np.ndarray | None) -> None:
    """Hold Triton's sum to the reference's in float64, relative to the sum of the absolute values of all terms."""
    backend = load_backend("triton")
    *_, out = given_ = [*map(sent, arguments)]
    getattr(backend, operation)(*given_, scale=sent(scale))
    expected, terms = [wide(list(arguments)) for _ in range(2)]
    terms = absolute(terms)
    expected[-1], terms[-1] = writable(expected[-1]), writable(terms[-1])
    getattr(reference, operation)(*expected, scale=wide(scale))
    getattr(reference, operation)(*terms, scale=absolute(wide(scale)))
    assert_agree(operation, backend.to_numpy(out), expected[-1], terms[-1])


def factors(rng: np.random.Generator, arrays: Arrays) -> np.ndarray:
    """Weights as a clip gives them: 0 for every example that is not finite, and for some others."""
    weights = writable(floats(rng, len(arrays[0])))
    for array in arrays:
        weights[~np.isfinite(array).all(axis=(1, 2))] = 0
    weights[rng.random(len(weights)) < 0.2] = 0
    return weights if rng.random() < 0.5 else weights.astype(np.float64)


@few
@given(seeds, examples, times, widths, widths, st.data())
def test_linear_maps_agree(seed: int, count: int, lengths: list[int], p: int, q: int, data: st.DataObject) -> None:
    rng, special = np.random.default_rng(seed), data.draw(st.booleans())
    inputs = [floats(rng, count, length, p, special=special) for length in lengths]
    gradients = [floats(rng, count, length, q) for length in lengths]
    points = [data.draw(point_weights) for _ in lengths]
    scale = floats(rng, q * p) if data.draw(st.booleans()) else None
    chosen = {"scale": scale, "gram": data.draw(st.booleans()), "exact": data.draw(st.booleans())}
    assert_norms_agree("linear_norms", inputs, gradients, points, **chosen)
    out = floats(rng, q * p).astype(np.float64)
    assert_sums_agree("linear_sum", inputs, gradients, points, factors(rng, inputs), out, scale=scale)


@few
@given(seeds, examples, times, widths.filter(bool), sizes, st.data())
def test_embeddings_agree(seed: int, count: int, lengths: list[int], q: int, size: int, data: st.DataObject) -> None:
    rng, special = np.random.default_rng(seed), data.draw(st.booleans())
    indices = [rng.integers(-1, size, (count, length)) for length in lengths]
    gradients = [writable(floats(rng, count, length, q, special=special)) for length in lengths]
    points = [data.draw(point_weights) for _ in lengths]
    scale = floats(rng, size * q) if data.draw(st.booleans()) else None
    weights = factors(rng, gradients)
    for index, gradient in zip(indices, gradients, strict=True):
        gradient[index < 0] = np.nan  # what is at a padding token does not matter
    assert_norms_agree("embedding_norms", indices, gradients, points, size, scale=scale)
    out = floats(rng, size * q).astype(np.float64)
    assert_sums_agree("embedding_sum", indices, gradients, points, weights, out, scale=scale)


@few
@given(seeds, examples, times, times, st.sampled_from([1, 3, 17]), sizes, st.data())
def test_norms_of_tied_matrices_agree(
    seed: int, count: int, token_lengths: list[int], lengths: list[int], p: int, size: int, data: st.DataObject
) -> None:
    rng, special = np.random.default_rng(seed), data.draw(st.booleans())
    indices = [rng.integers(-1, size, (count, length)) for length in token_lengths]
    token_gradients = [writable(floats(rng, count, length, p)) for length in token_lengths]
    inputs = [floats(rng, count, length, p) for length in lengths]
    gradients = [floats(rng, count, length, size, special=special) for length in lengths]
    points = [[data.draw(point_weights) for _ in chosen] for chosen in (token_lengths, lengths)]
    for index, gradient in zip(indices, token_gradients, strict=True):
        gradient[index < 0] = np.nan
    assert_norms_agree(
        "tied_norms", indices, token_gradients, points[0], inputs, gradients, points[1], size, exact=True
    )
