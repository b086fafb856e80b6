"""Averages of the parameters over time, and schedules of the learning rate."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore.stages.updates.averaging import ExponentialAverage, UniformAverage
from dpcore.stages.updates.schedules import WarmupCosine


def run(average, points: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(points[0])
    for step, x in enumerate(points):
        kept = kept + average.weight(step) * (x - kept)
    return kept


@given(st.floats(0, 0.999), st.integers(1, 30), st.integers(0, 9))
def test_the_exponential_average_has_weights_that_add_up_to_one(decay: float, steps: int, seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(steps, 3))
    weights = (1 - decay) * decay ** np.arange(steps - 1, -1, -1.0) / (1 - decay**steps)
    assert weights.sum() == pytest.approx(1)
    np.testing.assert_allclose(run(ExponentialAverage(decay), points), weights @ points, rtol=1e-9, atol=1e-12)


@given(st.integers(0, 12), st.integers(1, 30))
def test_the_uniform_average_is_the_mean_after_start(start: int, steps: int) -> None:
    points = np.random.default_rng(1).normal(size=(steps, 3))
    expected = points[start:].mean(axis=0) if steps > start else points[-1]
    np.testing.assert_allclose(run(UniformAverage(start), points), expected, rtol=1e-9, atol=1e-12)


def test_the_factor_rises_in_a_line_and_falls_in_half_a_cosine() -> None:
    schedule, steps = WarmupCosine(4, 0.1), 15
    factors = [schedule.factor(t, steps) for t in range(steps)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[-1] == pytest.approx(0.1)
    assert factors[9] == pytest.approx(0.55)  # half of the way from step 4 to step 14
    assert all(a > b for a, b in itertools.pairwise(factors[4:]))
    for t in range(4, steps):
        assert factors[t] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (t - 4) / 10)) / 2)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 2), (1, 2), (9, 10)])
def test_short_runs_stay_within_zero_and_one(warmup: int, steps: int) -> None:
    schedule = WarmupCosine(warmup)
    schedule.check(steps)
    assert all(0 <= schedule.factor(t, steps) <= 1 for t in range(steps))
    assert schedule.factor(0, steps) > 0
