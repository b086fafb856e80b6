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


def sent(arrays: Any) -> Any:
    """The arrays in the backend's memory; what is none stays as it is."""
    if isinstance(arrays, np.ndarray):
        return load_backend("triton").from_numpy(arrays)
    return [sent(array) for array in arrays] if isinstance(arrays, list) else arrays


def wide(arrays: Any) -> Any:
    """The arrays in float64, which the reference takes as the definition."""
    if isinstance(arrays, np.ndarray):
        return arrays.astype(np.float64) if arrays.dtype == np.float32 else arrays
    return [wide(array) for array in arrays] if isinstance(arrays, list) else arrays


def both(operation: str, *arguments: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Norms by Triton and by the reference in float64."""
    backend = load_backend("triton")
    got = getattr(backend, operation)(*map(sent, arguments), **{name: sent(value) for name, value in options.items()})
    with np.errstate(all="ignore"):
        expected = getattr(reference, operation)(
            *map(wide, arguments), **{name: wide(value) for name, value in options.items()}
        )
    return backend.to_numpy(got), expected


def sums(operation: str, *arguments: Any, weights: np.ndarray, out: np.ndarray, **options: Any) -> Any:
    """Sums by Triton, by the reference in float64, and of the absolute values of all terms."""
    backend = load_backend("triton")
    got, expected, terms = sent(out), writable(out), np.abs(out)
    named = {name: sent(value) for name, value in options.items()}
    getattr(backend, operation)(*map(sent, arguments), sent(weights), got, **named)
    with np.errstate(all="ignore"):
        run = getattr(reference, operation)
        run(*map(wide, arguments), wide(weights), expected, **wide_options(options))
        run(*map(absolute, arguments), absolute(weights), terms, **{k: absolute(v) for k, v in options.items()})
    return backend.to_numpy(got), expected, terms


def wide_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: wide(value) for name, value in options.items()}


def absolute(values: Any) -> Any:
    """Absolute values of all numbers that are multiplied; indices stay as they are."""
    if isinstance(values, list):
        return [absolute(value) for value in values]
    if isinstance(values, float):
        return abs(values)
    return np.abs(wide(values)) if isinstance(values, np.ndarray) and values.dtype != np.int64 else values


def assert_bounds(got: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Hold finite bounds to the agreement table, the others to be infinite or NaN in both."""
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
    finite = np.isfinite(expected)
    assert_agree(name, got[finite].astype(np.float32), expected[finite].astype(np.float32))
