"""Warm-up and cosine."""

from __future__ import annotations

import itertools
import math

import pytest

from dpcore.stages.updates.schedules import WarmupCosine


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
