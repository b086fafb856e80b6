"""A ring of vectors against a sum over all that was ever kept, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.backends import load_backend
from dpcore.spec.ops import RingCoefficients
from dpcore.spec.recurrence import correlated
from tests.refused import refused


@pytest.mark.parametrize("keeps", ["output", "input"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@given(st.integers(0, 6), st.integers(1, 20), st.integers(0, 2**31))
def test_a_ring_is_a_sum_over_the_last_vectors(backend: str, dtype: str, keeps: str, order: int, steps: int, seed: int):
    """With weights that change from step to step. The history is a list that grows: nothing in it goes round."""
    ops: Any = load_backend(backend)
    rng = np.random.default_rng(seed)
    history: list[Any] = [np.zeros(5)] * order
    vectors = [ops.from_numpy(np.zeros(5, dtype)) for _ in range(order)]
    theory = [np.zeros(5) for _ in range(order)]
    for step in range(steps):
        x, weights = rng.standard_normal(5).astype(dtype), tuple(rng.uniform(-0.3, 0.3, order).tolist())
        coefficients = RingCoefficients(weights, step % max(order, 1), float(rng.uniform(1, 2)), keeps)
        past = sum((w * history[-j] for j, w in enumerate(weights, start=1)), np.zeros(5))
        expected = (x.astype(np.float64) + past) / coefficients.normalizer
        history.append(expected if keeps == "output" else x.astype(np.float64))
        sent = ops.from_numpy(x)
        tolerance = 1e-5 if dtype == "float32" else 1e-13
        np.testing.assert_allclose(ops.to_numpy(ops.ring(sent, vectors, coefficients)), expected, atol=tolerance)
        np.testing.assert_allclose(correlated(x.astype(np.float64), theory, coefficients), expected, atol=1e-13)
        np.testing.assert_array_equal(ops.to_numpy(sent), x)
    for vector, kept in zip(vectors[: min(order, steps)], theory, strict=False):
        np.testing.assert_allclose(ops.to_numpy(vector), kept, atol=1e-5)


def test_the_result_is_no_view_of_the_ring() -> None:
    for name in ("numpy", "torch"):
        ops: Any = load_backend(name)
        vectors = [ops.from_numpy(np.ones(3)), ops.from_numpy(np.ones(3))]
        y = ops.ring(ops.from_numpy(np.ones(3)), vectors, RingCoefficients((0.5, 0.5), 0))
        vectors[0][...] = 9
        np.testing.assert_array_equal(ops.to_numpy(y), [2, 2, 2])


RING = RingCoefficients((0.5, 0.25), 1)


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda ops, v: ops.ring(v(3), [v(3)], RING), ArgumentError, "len(vectors)=1: must be 2, one for each weight of"),
    (lambda ops, v: ops.ring(v(3), [v(3)] * 3, RING), ArgumentError, "len(vectors)=3: must be 2"),
    (lambda ops, v: ops.ring(v(3), [v(3), v(4)], RING), ArgumentError, "vectors[1].shape=(4,): must be (3,)"),
    (lambda ops, v: ops.ring(v(3), [v(3)] * 2, RING._replace(place=2)), ArgumentError, "place=2: must be less than 2"),
    (lambda ops, v: ops.ring(v(3), [v(3)] * 2, RING._replace(place=-1)), ArgumentError, "place=-1"),
    (lambda ops, v: ops.ring(v(3), [v(3)] * 2, RING._replace(place=0.5)), ArgumentTypeError, "place=0.5"),
    (lambda ops, v: ops.ring(v(3), [v(3)] * 2, RING._replace(keeps="both")), ArgumentError, "keeps='both'"),
    (lambda ops, v: ops.ring([1.0], [v(1)] * 2, RING), ArgumentTypeError, "x of type list"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_bad_calls(name: str, call: Callable[..., Any], kind: type[Exception], words: str) -> None:
    ops: Any = load_backend(name)
    refused(kind, re.escape(words), call, ops, lambda size: ops.from_numpy(np.ones(size, np.float32)))
