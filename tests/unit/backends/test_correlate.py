"""Correlated noise on a grid against sums over all that was ever kept, bit for bit; and what it refuses."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.backends import load_backend
from dpcore.spec.grid import nearest
from dpcore.spec.ops import FilterCoefficients, RingCoefficients
from dpcore.spec.recurrence import correlated
from tests.refused import refused

seeds, grids = st.integers(0, 2**31), st.sampled_from([36, 30, 12])


def on_grid(rng: np.random.Generator, bits: int, size: int = 5) -> np.ndarray:
    return np.floor(rng.standard_normal(size) * 2.0**bits) * 2.0**-bits


def rounded(r: Any, bits: int) -> np.ndarray:
    """Of each number, the nearest multiple of 2^-bits, by Python's own rounding: to even ones of two."""
    return np.array([round(x * 2.0**bits) * 2.0**-bits for x in r.tolist()])


@given(st.lists(st.floats(-(2.0**51), 2.0**51) | st.integers(-100, 100).map(lambda k: k / 2), min_size=1, max_size=50))
def test_nearest_is_pythons_rounding(numbers: list[float]) -> None:
    assert [nearest(x) for x in numbers] == [round(x) for x in numbers]
    assert nearest(np.array(numbers)).tolist() == [round(x) for x in numbers]


@pytest.mark.parametrize("keeps", ["output", "input"])
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@given(st.integers(0, 6), st.integers(1, 20), seeds, grids)
def test_a_ring_is_a_sum_over_the_last_vectors(backend: str, keeps: str, order: int, steps: int, seed: int, bits: int):
    """With weights that change from step to step. The history is a list that grows: nothing in it goes round."""
    ops: Any = load_backend(backend)
    rng = np.random.default_rng(seed)
    history: list[Any] = [np.zeros(5)] * order
    vectors = [ops.from_numpy(np.zeros(5)) for _ in range(order)]
    theory = [np.zeros(5) for _ in range(order)]
    for step in range(steps):
        z, weights = on_grid(rng, bits), tuple(rng.uniform(-0.3, 0.3, order).tolist())
        coefficients = RingCoefficients(weights, step % max(order, 1), float(rng.uniform(1, 2)), keeps)
        m = z + rounded(sum((w * history[-j] for j, w in enumerate(weights, start=1)), np.zeros(5)), bits)
        history.append(m * (1 / coefficients.normalizer) if keeps == "output" else z)
        sent = ops.from_numpy(z)
        np.testing.assert_array_equal(ops.to_numpy(ops.correlate(sent, vectors, coefficients, bits=bits)), m)
        np.testing.assert_array_equal(ops.to_numpy(sent), z)
        exact = correlated(z, theory, coefficients) * coefficients.normalizer
        np.testing.assert_allclose(m, exact, atol=(1 + steps) * 2.0**-bits)
    for vector, kept in zip(vectors, [history[order + step] for step in places(order, steps)], strict=True):
        np.testing.assert_array_equal(ops.to_numpy(vector), kept)


def places(order: int, steps: int) -> list[int]:
    """The step that each place of a ring was written at, before the first one where it was not."""
    return [max((step for step in range(steps) if step % order == place), default=-1) for place in range(order)]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 20), seeds, grids)
def test_a_recurrence_goes_on_from_what_was_rounded(
    backend: str, forward: int, back: int, steps: int, seed: int, bits: int
) -> None:
    """m is the recurrence's output, to float64, for the inputs ``m - r``: those move by half a step of the grid."""
    ops: Any = load_backend(backend)
    rng = np.random.default_rng(seed)
    b, a = (1.0, *rng.uniform(-0.3, 0.3, forward).tolist()), tuple(rng.uniform(-0.3, 0.3, back).tolist())
    state = [ops.from_numpy(np.zeros(5)) for _ in range(max(forward, back))]
    inputs, outputs, theory = list[Any](), list[Any](), [np.zeros(5) for _ in state]
    for _ in range(steps):
        z, first = on_grid(rng, bits), ops.to_numpy(state[0]) if state else np.zeros(5)
        sent = ops.from_numpy(z)
        m = ops.to_numpy(ops.correlate(sent, state, FilterCoefficients(b, a, 0.7), bits=bits))
        np.testing.assert_array_equal(ops.to_numpy(sent), z)
        np.testing.assert_array_equal(m, z + rounded(first, bits))
        inputs.append(m - first)
        outputs.append(m)
        assert (abs(inputs[-1] - z) <= 2.0 ** (-bits - 1) + 2.0**-50).all()
        exact = sum(c * x for c, x in zip(b, inputs[::-1], strict=False))
        exact = exact - sum(c * y for c, y in zip(a, outputs[-2::-1], strict=False))
        np.testing.assert_allclose(m, exact, rtol=1e-13, atol=1e-13)
        exact = correlated(inputs[-1], theory, FilterCoefficients(b, a))
        np.testing.assert_allclose(m, exact, rtol=1e-13, atol=1e-13)
    for vector, kept in zip(state, theory, strict=True):
        np.testing.assert_allclose(ops.to_numpy(vector), kept, rtol=1e-13, atol=1e-13)


def test_the_result_is_no_view_of_the_state() -> None:
    for name in ("numpy", "torch"):
        ops: Any = load_backend(name)
        for coefficients in (RingCoefficients((0.5, 0.5), 0), FilterCoefficients((1.0, 0.5, 0.5), ())):
            state = [ops.from_numpy(np.ones(3)), ops.from_numpy(np.ones(3))]
            y = ops.correlate(ops.from_numpy(np.ones(3)), state, coefficients)
            state[0][...] = 9
            np.testing.assert_array_equal(ops.to_numpy(y), [2, 2, 2])


RING, FILTER = RingCoefficients((0.5, 0.25), 1), FilterCoefficients((1.0, 0.5), (0.25,))


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda run, v: run(v(3), [v(3)], RING), ArgumentError, "len(state)=1: must be 2, one for each weight of the ring"),
    (lambda run, v: run(v(3), [v(3)] * 3, RING), ArgumentError, "len(state)=3: must be 2"),
    (lambda run, v: run(v(3), [v(3), v(4)], RING), ArgumentError, "state[1].shape=(4,): must be (3,)"),
    (lambda run, v: run(v(3), [v(3)] * 2, RING._replace(place=2)), ArgumentError, "place=2: must be less than 2"),
    (lambda run, v: run(v(3), [v(3)] * 2, RING._replace(place=-1)), ArgumentError, "place=-1"),
    (lambda run, v: run(v(3), [v(3)] * 2, RING._replace(place=0.5)), ArgumentTypeError, "place=0.5"),
    (lambda run, v: run(v(3), [v(3)] * 2, RING._replace(keeps="both")), ArgumentError, "keeps='both'"),
    (lambda run, v: run([1.0], [v(1)] * 2, RING), ArgumentTypeError, "z of type list"),
    (lambda run, v: run(v(3, "float32"), [v(3)] * 2, RING), ArgumentTypeError, "z.dtype=float32: must be float64"),
    (lambda run, v: run(v(3), [v(3), v(3, "float32")], RING), ArgumentTypeError, "state[1].dtype=float32: must be"),
    (lambda run, v: run(v(3), [v(3)] * 2, RING, bits=37), ArgumentError, "bits=37: must be from 0 to 36"),
    (lambda run, v: run(v(3), [v(3)] * 2, RING, bits=-1), ArgumentError, "bits=-1"),
    (lambda run, v: run(v(3), [], FILTER), ArgumentError, "len(state)=0: must be 1, the order of the recurrence"),
    (lambda run, v: run(v(3), [v(3)] * 2, FILTER), ArgumentError, "len(state)=2: must be 1"),
    (lambda run, v: run(v(3), [v(3)], FILTER._replace(b=(0.9,))), ArgumentError, "b=(0.9,): must begin with 1"),
    (lambda run, v: run(v(3), [v(3)], FILTER._replace(b=())), ArgumentError, "b=(): must begin with 1"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_bad_calls(name: str, call: Callable[..., Any], kind: type[Exception], words: str) -> None:
    ops: Any = load_backend(name)
    refused(
        kind, re.escape(words), call, ops.correlate, lambda size, dtype="float64": ops.from_numpy(np.ones(size, dtype))
    )


@pytest.mark.parametrize("name", ["numpy", "torch", "triton"])
@pytest.mark.parametrize("bits", [-1, 37])
def test_normals_of_no_grid_are_refused(name: str, bits: int) -> None:
    normal: Any = load_backend(name).normal
    refused(ArgumentError, f"bits={bits}: must be from 0 to 36", normal, bytes(32), 0, 0, 0, 1, bits=bits)
