"""Student's and Welch's intervals against scipy, and by how often they hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpcore.cli.intervals import difference_interval, mean_interval
from dpcore.errors import ArgumentError

FIRST, SECOND = [0.91, 0.88, 0.93, 0.90], [0.80, 0.89, 0.84]


def test_the_mean_is_scipys():
    found = mean_interval(FIRST)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(FIRST), scale=stats.sem(FIRST))
    ends = found.center - found.half_width, found.center + found.half_width
    assert ends == pytest.approx((low, high), rel=1e-12)


def test_the_difference_is_scipys():
    found = difference_interval(FIRST, SECOND)
    expected = stats.ttest_ind(FIRST, SECOND, equal_var=False).confidence_interval(0.95)
    ends = found.center - found.half_width, found.center + found.half_width
    assert ends == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.excludes_zero is (ends[0] > 0)


def test_the_interval_holds_the_mean_as_often_as_it_says():
    draws = np.random.default_rng(1).normal(size=(4000, 3))
    held = [abs(found.center) <= found.half_width for found in map(mean_interval, draws)]
    assert 0.94 < np.mean(held) < 0.96


def test_one_value_has_no_interval_and_none_is_refused():
    assert math.isnan(mean_interval([0.5]).half_width)
    one = difference_interval([0.5], [0.1, 0.2])
    assert one.center == pytest.approx(0.35)
    assert not one.excludes_zero
    assert difference_interval([0.5, 0.5], [0.5, 0.5]).half_width == 0
    assert not difference_interval([0.5, 0.5], [0.5, 0.5]).excludes_zero
    with pytest.raises(ArgumentError, match="at least one value"):
        mean_interval([])
