"""The grid of a release: integers that float64 adds exactly, and what rounding to them moves."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore.errors import ArgumentError
from dpcore.spec.contributions import CANCELLATION, MOST_ROUNDED
from dpcore.spec.grid import LEAST_BITS, bits_for, moved_share, nearest, released, step_of
from dpcore.spec.rounded_normal import LARGEST
from tests.refused import refused

sizes = st.floats(1e-3, 2.0**38)


@given(sizes, st.floats(1, 1e4))
def test_integers_of_sums_and_releases_are_added_exactly(largest: float, growth: float) -> None:
    """The largest sum and the largest noise, both rounded up, and their sum: whole numbers that float64 has."""
    if largest > 2.0 ** (48 - LEAST_BITS) or largest + 2 * LARGEST * growth > 2.0 ** (51 - LEAST_BITS):
        refused(ArgumentError, "noise_multiplier: the largest sum may be", bits_for, largest, growth)
        return
    bits = bits_for(largest, growth)
    assert LEAST_BITS <= bits <= 36
    most, noise = math.ceil(largest * 2.0**bits), math.ceil(LARGEST * growth * 2.0**bits)
    assert max(most, noise, most + noise) <= 2**51
    assert nearest(float(most)) == most
    # Terms that cancel, each at most 1 / CANCELLATION of a vector, with what rounding adds to them.
    assert most * (1 / CANCELLATION) * (1 + MOST_ROUNDED) < 2**53
    # No grid that is twice as fine would do, but for what the stream has.
    finer = 2.0 ** (bits + 1)
    assert bits == 36 or largest * finer > 2**48 or (largest + 2 * LARGEST * growth) * finer > 2**51


def test_a_step_is_that_of_the_noise_over_its_normalizer() -> None:
    assert step_of(3.0, 10) == 3.0 / 1024
    assert step_of(3.0, 10, 0.75) == 4.0 / 1024


@given(st.integers(0, 2**32), st.sampled_from([36, 30, 12]))
def test_a_release_is_the_sum_and_the_noise_exactly(seed: int, bits: int) -> None:
    rng = np.random.default_rng(seed)
    total = np.rint(rng.uniform(-1, 1, 20) * 2.0**48)
    m = np.floor(rng.standard_normal(20) * 2.0**bits) * 2.0**-bits
    before = total.copy()
    got = released(total, m, bits, 1.0)
    np.testing.assert_array_equal(total, before)
    for integer, own, z in zip(got.tolist(), total.tolist(), m.tolist(), strict=True):
        assert int(integer) == int(own) + Fraction(z) * 2**bits
    np.testing.assert_array_equal(released(total, m, bits, 0.3), got * 0.3)


def test_noise_is_raised_by_what_rounding_moves() -> None:
    """Sums are not rounded, squares by 3/2 steps a coordinate, and a run's rows by 3/2 more, through L."""
    assert moved_share(36, 10**6) == 0.0
    assert moved_share(36, 10**6, squares=True) == pytest.approx(1.5 * 2.0**-36 * 1e3, rel=1e-12)
    assert moved_share(20, 4, 0.5, squares=True) == pytest.approx(1.5 * 2.0**-20 * 2 / 0.5, rel=1e-12)
    assert moved_share(20, 4, 2.0, rows=9, carried=5.0) == pytest.approx(1.5 * 5 * 3 * 2.0**-20 * 2 / 2, rel=1e-12)
    both = moved_share(20, 4, 2.0, rows=9, carried=5.0, squares=True)
    assert both == pytest.approx(3 * 5 * 3 * 2.0**-20 * 2 / 2, rel=1e-12)


def test_noise_whose_grid_hides_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="noise_multiplier: is so large that the grid of its noise"):
        moved_share(36, 10**8, 1e-9, squares=True)
