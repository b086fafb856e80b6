"""Filters against scipy, and the filters that are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.signal import lfilter

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.check import order_of
from dpcore.spec.ops import FilterCoefficients
from dpcore.stages.filters import NAMED_FILTERS, Averaging, Filter, Identity, LowPass, named_filter
from dpcore_numpy import recurrence


def run(filter_stage: Filter, signal: np.ndarray) -> np.ndarray:
    """Pass each row of the signal through the recurrences of its step, in a row."""
    state = [np.zeros(signal.shape[1], signal.dtype) for _ in range(filter_stage.order)]
    outputs = []
    for t, y in enumerate(signal):
        used = 0
        for coefficients in filter_stage.coefficients(t):
            order = order_of(coefficients)
            y = recurrence(y, state[used : used + order], coefficients)
            used += order
        assert used == filter_stage.order
        outputs.append(y)
    return np.stack(outputs)


def reference(b: tuple[float, ...], a: tuple[float, ...], signal: np.ndarray) -> np.ndarray:
    normalizer = lfilter(b, (1.0, *a), np.ones(len(signal)))
    return lfilter(b, (1.0, *a), signal, axis=0) / normalizer[:, None]


@pytest.mark.parametrize("name", NAMED_FILTERS)
def test_named_filters_are_scipys_lfilter_with_the_bias_removed(name: str) -> None:
    signal = np.random.default_rng(0).normal(size=(200, 3))
    b, a = NAMED_FILTERS[name]
    np.testing.assert_allclose(run(named_filter(name), signal), reference(b, a, signal), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMED_FILTERS)
def test_named_filters_have_unit_gain_and_state_of_the_order_only(name: str) -> None:
    stage = named_filter(name)
    assert run(stage, np.ones((300, 1))) == pytest.approx(1.0)
    assert sum(stage.b) - sum(stage.a) == pytest.approx(1.0)
    assert stage.order == max(len(stage.a), len(stage.b) - 1)


@given(
    st.lists(st.complex_numbers(max_magnitude=0.95, allow_nan=False, allow_infinity=False), max_size=2),
    st.lists(st.floats(-1, 1), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_any_stable_filter_is_scipys(poles: list[complex], taps: list[float], seed: int) -> None:
    a = tuple(np.real(np.atleast_1d(np.poly([*poles, *np.conj(poles)])))[1:].tolist())
    gain = sum(taps) / (1 + sum(a))
    assume(abs(gain) > 1e-2)
    b = tuple(tap / gain for tap in taps)
    normalizers = np.abs(lfilter(b, (1.0, *a), np.ones(4096)))
    assume(normalizers.min() > 1e-3)
    stage = LowPass(b=b, a=a)
    signal = np.random.default_rng(seed).normal(size=(40, 2))
    got, expected = run(stage, signal), reference(b, a, signal)
    weights = np.abs(lfilter(b, (1.0, *a), np.eye(40)[0])).sum() / normalizers.min()
    np.testing.assert_allclose(got, expected, atol=1e-10 * max(weights, 1))


def test_swapped_coefficients_are_noticed() -> None:
    signal = np.random.default_rng(1).normal(size=(50, 2))
    swapped = run(LowPass(b=(0.025, 0.075), a=(-0.9,)), signal)
    assert not np.allclose(swapped, reference((0.075, 0.025), (-0.9,), signal))


def test_averaging_starts_at_the_first_gradient() -> None:
    signal = np.random.default_rng(2).normal(size=(30, 4))
    expected, average = [], signal[0]
    for g in signal:
        average = 0.3 * average + 0.7 * g
        expected.append(average)
    np.testing.assert_allclose(run(Averaging(0.7), signal), expected, rtol=1e-13)
    np.testing.assert_array_equal(run(Averaging(0.7), signal)[0], signal[0])


def test_identity_is_the_identity() -> None:
    signal = np.random.default_rng(3).normal(size=(5, 4))
    np.testing.assert_array_equal(run(Identity(), signal), signal)


def test_normalizers_far_beyond_the_checked_steps() -> None:
    stage = LowPass(b=(1e-4,), a=(-(1 - 1e-4),))
    for step in (0, 63, 64, 5000, 20_000):
        assert stage.coefficients(step)[0].normalizer == pytest.approx(-math.expm1((step + 1) * math.log1p(-1e-4)))


@pytest.mark.parametrize(
    ("b", "a", "words"),
    [
        ([0.5], [-1.5], "pole 1.5"),
        ([2.0], [-1.0], "unstable"),
        ([0.1], [0.2, 1.2], "modulus 1.095"),
        ([0.5], [-0.9], "gain is 5 and must be 1; divide b by 5"),
        ([], [], "b=[]"),
        ([0.0, 1.0], [], "normalizer c_t is 0 at step 0"),
        ([1.0, -1.0, 1.0], [], "normalizer c_t is 0 at step 1"),
        ([math.nan], [], "b=nan"),
        ([1.0, math.inf], [], "b=inf"),
    ],
)
def test_refused_filters(b: list[float], a: list[float], words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        LowPass(b=b, a=a)
    assert words in str(caught.value)


def test_unknown_names_say_the_nearest() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'first-order v1'"):
        named_filter("first order v1")
    with pytest.raises(ArgumentTypeError, match="real number"):
        LowPass(b=["x"])  # type: ignore[list-item]


@pytest.mark.parametrize("kappa", [0, -0.1, 1.1, math.nan])
def test_averaging_refuses(kappa: float) -> None:
    with pytest.raises(ArgumentError, match="kappa="):
        Averaging(kappa)


def test_a_state_that_is_too_short_is_refused() -> None:
    with pytest.raises(ArgumentError, match="len\\(state\\)=0"):
        recurrence(np.ones(3), [], *named_filter("momentum").coefficients(0))


def test_numpy_scalars_as_coefficients_do_not_widen() -> None:
    coefficients = FilterCoefficients((np.float64(0.1),), (np.float64(-0.9),), np.float64(0.1))
    state = [np.zeros(3, np.float32)]
    assert recurrence(np.ones(3, np.float32), state, coefficients).dtype == np.float32
    assert state[0].dtype == np.float32
