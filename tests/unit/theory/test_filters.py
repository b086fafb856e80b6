"""Filters in numbers, against SciPy, against closed forms and against the backend that runs them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.linalg
import scipy.signal

import dpcore_numpy
from dpcore.errors import ArgumentError
from dpcore.spec.ops import FilterCoefficients
from dpcore.stages.filters import NAMED_FILTERS, Averaging, Identity, LowPass, named_filter
from dpcore.theory.analysis import filters
from tests.refused import refused

NAMES = sorted(NAMED_FILTERS)
FREQUENCIES = np.linspace(0, 0.5, 101)


def impulse(size: int) -> np.ndarray:
    return np.eye(1, size)[0]


class Row:
    """Filters in a row."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        return tuple(item for part in self.parts for item in part.coefficients(step))  # type: ignore[attr-defined]


class RunningMean:
    """y_t = the mean of g_0..g_t, by coefficients that never settle."""

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        # a of step t weighs y_t inside y_{t+1}.
        return (FilterCoefficients((1 / (step + 1),), (-(step + 1) / (step + 2),)),)


@pytest.mark.parametrize("name", NAMES)
def test_the_responses_are_scipys(name: str) -> None:
    b, a = NAMED_FILTERS[name]
    stage = named_filter(name)
    kappa = scipy.signal.lfilter(b, [1, *a], impulse(80))
    ones = scipy.signal.lfilter(b, [1, *a], np.ones(80))
    assert filters.impulse_response(stage, 80) == pytest.approx(kappa, abs=1e-14)
    assert filters.impulse_response(stage, 80, start=17) == pytest.approx(kappa, abs=1e-14)
    assert filters.normalizers(stage, 80) == pytest.approx(ones, abs=1e-13)
    _, expected = scipy.signal.freqz(b, [1, *a], worN=2 * np.pi * FREQUENCIES)
    assert filters.frequency_response(stage, FREQUENCIES) == pytest.approx(expected, abs=1e-12)
    assert filters.gain(stage) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_noise_factor_is_the_sum_of_squared_normalized_weights(name: str) -> None:
    b, a = NAMED_FILTERS[name]
    stage = named_filter(name)
    kappa = scipy.signal.lfilter(b, [1, *a], impulse(2000))
    for step, value in enumerate(filters.noise_factor(stage, 40)):
        normalized = kappa[: step + 1] / kappa[: step + 1].sum()
        assert value == pytest.approx((normalized**2).sum(), rel=1e-10)
    assert filters.limiting_noise_factor(stage) == pytest.approx((kappa**2).sum(), rel=1e-12)


def test_closed_forms_of_momentum() -> None:
    stage = LowPass((0.1,), (-0.9,))
    assert filters.impulse_response(stage, 30) == pytest.approx(0.1 * 0.9 ** np.arange(30))
    assert filters.normalizers(stage, 30) == pytest.approx(1 - 0.9 ** np.arange(1, 31))
    assert filters.limiting_noise_factor(stage) == pytest.approx(0.1 / 1.9)
    assert filters.poles(stage) == pytest.approx([0.9])
    assert filters.delay(stage) == pytest.approx(9)
    assert filters.half_life(stage) == pytest.approx(np.log(2) / -np.log(0.9))
    # |H|^2 = .01 / (1 - 1.8 cos w + .81) = 1/2
    assert filters.cutoff(stage) == pytest.approx(np.arccos((1.81 - 0.02) / 1.8) / (2 * np.pi), rel=1e-9)


def test_weights_are_what_the_backend_computes() -> None:
    steps = 12
    row = Row(named_filter("f6"), Averaging(0.3), Identity(), named_filter("first-order v1"))
    matrix = filters.weights(row, steps)
    g = np.random.default_rng(1).standard_normal((steps, 5))
    states = [[np.zeros(5) for _ in range(max(len(item.b) - 1, len(item.a)))] for item in row.coefficients(0)]
    for step in range(steps):
        y = g[step]
        for state, item in zip(states, row.coefficients(step), strict=True):
            y = dpcore_numpy.recurrence(y, state, item)
        assert matrix[step] @ g == pytest.approx(y, abs=1e-12)
    assert np.all(matrix == np.tril(matrix))
    # Every filter of the row weighs the past with weights that add up to 1.
    assert matrix.sum(axis=1) == pytest.approx(np.ones(steps))


def test_coefficients_that_change_from_step_to_step() -> None:
    assert filters.noise_factor(RunningMean(), 20) == pytest.approx(1 / np.arange(1, 21))
    assert filters.weights(RunningMean(), 4)[3] == pytest.approx([0.25] * 4)
    assert filters.impulse_response(RunningMean(), 5, start=3) == pytest.approx(1 / np.arange(4, 9))
    # DiSK's average starts at g_0, later it weighs a new gradient by kappa.
    assert filters.impulse_response(Averaging(0.7), 3) == pytest.approx([1, 0.3, 0.09])
    assert filters.impulse_response(Averaging(0.7), 3, start=5) == pytest.approx([0.7, 0.21, 0.063])
    assert filters.limiting_noise_factor(Averaging(0.7)) == pytest.approx(0.49 / (1 - 0.09))


def test_no_filter_and_finite_memory() -> None:
    assert filters.noise_factor(Identity(), 3) == pytest.approx([1, 1, 1])
    assert filters.limiting_noise_factor(Identity()) == 1
    assert (filters.delay(Identity()), filters.half_life(Identity())) == (0, 0)
    assert np.isnan(filters.cutoff(Identity()))
    mean = LowPass((0.25,) * 4)
    assert filters.limiting_noise_factor(mean) == pytest.approx(0.25)
    assert (filters.delay(mean), filters.half_life(mean)) == (pytest.approx(1.5), 0)


def test_filters_that_doppler_refuses_have_numbers_too() -> None:
    unstable = filters.Recurrence((0.1,), (-1.1,))
    assert not filters.is_stable(unstable)
    assert filters.impulse_response(unstable, 4) == pytest.approx(0.1 * 1.1 ** np.arange(4))
    assert filters.limiting_noise_factor(unstable) == filters.half_life(unstable) == np.inf
    assert np.isnan(filters.delay(unstable))
    assert np.isnan(filters.cutoff(unstable))
    assert filters.gain(filters.Recurrence((0.5,), (-0.9,))) == pytest.approx(5)
    assert filters.gain(filters.Recurrence((0.5,), (-1.0,))) == np.inf
    # c_1 = 1 - 1 = 0: the output of step 1 is infinite.
    assert not np.isfinite(filters.noise_factor(filters.Recurrence((1, -1, 1)), 3)[1])
    assert filters.noise_factor(filters.Recurrence((0.1,), (-0.9,)), 9) == pytest.approx(
        filters.noise_factor(named_filter("momentum"), 9)
    )


def test_snr_is_the_double_sum() -> None:
    generator = np.random.default_rng(3)
    c, kappa = generator.random(9), generator.standard_normal(9)
    upper = sum(c[tau] * kappa[tau] for t in range(9) for tau in range(t + 1))
    lower = sum(kappa[tau] ** 2 for t in range(9) for tau in range(t + 1))
    assert filters.snr(c, kappa) == pytest.approx(upper / lower)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        *((lambda c=c, k=k: filters.snr(c, k), "same T") for c, k in (([0.5], [1, 0]), ([], []), ([[0.5]], [[1]]))),
        (lambda: filters.snr([0.5], [0]), "zero everywhere"),
        (lambda: filters.impulse_response(Identity(), 0), "steps=0"),
        (lambda: filters.impulse_response(Identity(), 1, start=-1), "start=-1"),
        (lambda: filters.Recurrence(()), "must hold at least the coefficient b_0"),
    ],
)
def test_nonsense_is_refused(call: Callable[[], object], said: str) -> None:
    refused(ArgumentError, said, call)
