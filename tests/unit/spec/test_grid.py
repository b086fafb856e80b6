"""The grid of a release: integers that float64 adds exactly, and what rounding to them moves."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore.errors import ArgumentError
from dpcore.spec.grid import LEAST_BITS, bits_for, moved_share, nearest, released, step_of
from dpcore.spec.rounded_normal import LARGEST
from tests.refused import refused

sizes = st.floats(1e-3, 2.0**38)


@given(sizes, st.floats(1, 1e4))
def test_integers_of_a_release_are_added_exactly(largest: float, growth: float) -> None:
    """The largest sum and the largest noise, both rounded up, and their sum: whole numbers that float64 has."""
    if largest + 2 * LARGEST * growth > 2.0 ** (51 - LEAST_BITS):
        refused(ArgumentError, "noise_multiplier: the largest sum may be", bits_for, largest, growth)
        return
    bits = bits_for(largest, growth)
    assert LEAST_BITS <= bits <= 36
    most, noise = math.ceil(largest * 2.0**bits), math.ceil(LARGEST * growth * 2.0**bits)
    assert max(most, noise, most + noise) <= 2**51
    assert nearest(float(most)) == most
    # No grid that is twice as fine would do, but for what the stream has.
    assert bits == 36 or (largest + 2 * LARGEST * growth) * 2.0 ** (bits + 1) > 2**51


def test_a_step_is_that_of_the_noise_over_its_normalizer() -> None:
    assert step_of(3.0, 10) == 3.0 / 1024
    assert step_of(3.0, 10, 0.75) == 4.0 / 1024


@given(st.integers(0, 2**32), st.sampled_from([36, 30, 12]), st.floats(1e-6, 1e6))
def test_a_release_is_whole_steps_and_moves_with_the_sum(seed: int, bits: int, scale: float) -> None:
    """By fractions: the sum is rounded by half a step and what its product rounds; the noise is not rounded at all."""
    rng, step = np.random.default_rng(seed), step_of(scale, bits)
    clean = rng.uniform(-1, 1, 20) * min(2.0**51 * step, 1e3 * scale)
    m = np.floor(rng.standard_normal(20) * 2.0**bits) * 2.0**-bits
    before = clean.copy()
    got = released(clean, m, step, bits, 1.0)
    np.testing.assert_array_equal(clean, before)
    for integer, s, z in zip(got.tolist(), clean.tolist(), m.tolist(), strict=True):
        assert integer == int(integer)
        own = int(integer) - Fraction(z) * 2**bits
        assert own.denominator == 1
        assert abs(own - Fraction(s) * Fraction(1 / step)) <= Fraction(3, 4)


def test_noise_is_raised_by_what_rounding_moves() -> None:
    """Two sums of neighbors move apart by 3/2 steps more in each coordinate, and a run's rows by 3, through L."""
    assert moved_share(36, 10**6) == pytest.approx(1.5 * 2.0**-36 * 1e3, rel=1e-12)
    assert moved_share(20, 4, 0.5) == pytest.approx(1.5 * 2.0**-20 * 2 / 0.5, rel=1e-12)
    assert moved_share(20, 4, 2.0, rows=9, carried=5.0) == pytest.approx(3 * 5 * 3 * 2.0**-20 * 2 / 2, rel=1e-12)


def test_noise_whose_grid_hides_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="noise_multiplier: is so large that the grid of its noise"):
        moved_share(36, 10**8, 1e-9)
