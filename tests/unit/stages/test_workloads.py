"""Workloads: the matrices that their recurrences stand for."""

from __future__ import annotations

import numpy as np
import pytest
from dpcore.strategies import Workload, workloads
from hypothesis import given
from hypothesis import strategies as st

from dpcore.errors import ArgumentError
from tests.refused import refused

T = 7


def lower(series: list[float]) -> np.ndarray:
    return np.array([[series[t - s] if s <= t else 0.0 for s in range(T)] for t in range(T)])


def test_each_is_its_definition():
    ones = lower([1.0] * T)
    heavy = lower([0.9**k for k in range(T)])
    np.testing.assert_allclose(workloads.ones(T), ones)
    np.testing.assert_allclose(workloads.momentum(T, 0.9), ones @ heavy)
    np.testing.assert_allclose(workloads.weight_decay(T, 0.1), heavy)
    np.testing.assert_allclose(workloads.exponential_average(T, 0.9), 0.1 * heavy @ ones)
    np.testing.assert_allclose(workloads.srg(T, 0.9, 0.5), ones @ heavy @ lower([0.5**k for k in range(T)]))
    rates = np.linspace(1.0, 0.1, T)
    np.testing.assert_allclose(workloads.learning_rates(rates), ones * rates)
    factors = np.linspace(0.0, 1.0, T)
    expected = np.eye(T)
    for t in range(1, T):
        expected[t, :t] = factors[t] * expected[t - 1, :t]
    np.testing.assert_allclose(workloads.accumulation(T, factors), expected)


@given(st.integers(1, 9), st.data())
def test_products_are_those_of_the_matrices(steps: int, data: st.DataObject):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))

    def some(bands: int) -> Workload:
        inverse = rng.standard_normal((min(bands, steps), steps))
        inverse[0] = 1 + rng.random(steps)
        return Workload(inverse)

    first, second = some(data.draw(st.integers(1, 4))), some(data.draw(st.integers(1, 4)))
    np.testing.assert_allclose(first @ second, np.asarray(first) @ np.asarray(second), rtol=1e-6, atol=1e-8)
    vector = rng.standard_normal(steps)
    np.testing.assert_allclose(first @ vector, np.asarray(first) @ vector, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(np.asarray(first), np.tril(first))


def test_what_is_constant_along_its_diagonals():
    series = workloads.momentum(T, 0.9).series()
    assert series is not None
    np.testing.assert_allclose(series, [1.0, -1.9, 0.9])
    assert workloads.learning_rates(np.linspace(1, 2, T)).series() is None
    assert workloads.ones(1).series() is not None


def test_nonsense():
    refused(ArgumentError, "rates: must be positive", workloads.learning_rates, [1.0, 0.0])
    refused(ArgumentError, "steps=0", workloads.ones, 0)
    refused(ArgumentError, r"decay=1\.5", workloads.weight_decay, 3, 1.5)
    with pytest.raises(ArgumentError, match="inverse: the diagonal entry"):
        Workload(np.array([[1.0, 0.0]]))
    with pytest.raises(ArgumentError, match=r"inverse.shape=\(3, 2\)"):
        Workload(np.ones((3, 2)))
    with pytest.raises(ArgumentError, match="steps=3: must be 2"):
        _ = workloads.ones(2) @ workloads.ones(3)
