"""The theory's numbers against brute force and simulation."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.linalg
import scipy.signal
from hypothesis import given
from hypothesis import strategies as st

import dpcore_numpy
from dpcore import theory
from dpcore.errors import ArgumentError
from dpcore.spec.ops import FilterCoefficients
from dpcore.stages.filters import NAMED_FILTERS, Averaging, Identity, LowPass, named_filter
from dpcore.stages.queries import ParameterWindow
from dpcore.theory.analysis import filters, recorded, spectrum
from dpcore.theory.analysis.moments import negative_share
from tests.refused import refused

SIGMAS = st.tuples(st.floats(0.0, 0.95), st.floats(0.01, 2.0), st.floats(0.1, 3.0)).map(
    lambda s: (s[0] * s[2], s[1] * s[2], s[2])
)


def riccati(p: float, sH: float, sv: float, sw: float) -> float:
    k = (p + sH + sv) / (p + sw + sv)
    return (1 - k) * (p + sH + sv)


@given(SIGMAS)
def test_the_steady_state_is_where_the_recursion_ends(sigmas: tuple[float, float, float]) -> None:
    sH, sv, sw = (sigma**2 for sigma in sigmas)
    p = sw
    for _ in range(5000):
        p = riccati(p, sH, sv, sw)
    assert theory.steady_variance(*sigmas) == pytest.approx(p, rel=1e-8)
    assert theory.kappa_from_variances(*sigmas) == pytest.approx((p + sH + sv) / (p + sw + sv), rel=1e-8)
    R = math.sqrt((sH + sv) * (4 * sw - 3 * sH + sv))
    assert theory.steady_variance(*sigmas) == pytest.approx((R - (sH + sv)) / 2, rel=1e-6)


@given(SIGMAS)
def test_the_rate_is_the_recursions_and_not_the_papers(sigmas: tuple[float, float, float]) -> None:
    sH, sv, sw = (sigma**2 for sigma in sigmas)
    p_inf, rate = theory.steady_variance(*sigmas), theory.kalman_rate(*sigmas)
    p = p_inf * (1 + 1e-5)
    measured = (riccati(p, sH, sv, sw) - p_inf) / (p - p_inf)
    assert rate == pytest.approx(measured, rel=1e-3, abs=1e-6)
    R = math.sqrt((sH + sv) * (4 * sw - 3 * sH + sv))
    assert rate == pytest.approx((2 * sw - sH + sv - R) / (2 * sw - sH + sv + R), rel=1e-6, abs=1e-12)
    assert rate == pytest.approx((1 - theory.kappa_from_variances(*sigmas)) ** 2, rel=1e-9)


@given(st.floats(0, 0.999), st.integers(1, 30))
def test_pmlf_variance_factor_is_the_sum_of_squared_weights(beta: float, window: int) -> None:
    weights = beta ** np.arange(window)
    weights /= weights.sum()
    factor, rho = theory.pmlf_variance_factor(beta, window)
    assert factor == pytest.approx((weights**2).sum(), rel=1e-9)
    assert rho == pytest.approx((weights**2).sum() ** -0.5, rel=1e-9)
    points = ParameterWindow(beta=beta, window=window).points(40)
    assert factor == pytest.approx(sum(point.weight**2 for point in points))


def test_noise_factor() -> None:
    assert [theory.theoretical_noise_factor(snr) for snr in (0.5, 2)] == [1, 0.25]  # no filter: c_0 = 1/2, kappa_0 = 1


def test_bias_correction_regime_at_the_papers_example() -> None:
    """Section 4: 0.15 sqrt(d) at beta2 = 0.999."""
    regime = theory.bias_correction_regime(2048, 1.0, 10**6)
    assert regime.threshold == pytest.approx(150, rel=0.01)
    assert regime.same_direction == 2048
    assert regime.orthogonal == pytest.approx(math.sqrt(2048))
    assert regime.trustworthy_if_same_direction
    assert not regime.trustworthy_if_orthogonal
    beta2 = 0.97
    assert theory.bias_correction_regime(8, 2.0, 9, beta2).threshold == pytest.approx(
        3 * ((1 - beta2) ** 2 / (1 - beta2**2)) ** 0.25
    )
    noiseless = theory.bias_correction_regime(8, 0, 9)
    assert noiseless.trustworthy_if_orthogonal


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_bias_correction_regime_by_simulation(scale: float) -> None:
    """The share of negative debiased moments falls from near half to near none as the condition comes to hold."""
    rng = np.random.default_rng(0)
    d, beta2, clip = 20_000, 0.9, 1.0
    g = clip / math.sqrt(d)
    threshold = theory.bias_correction_regime(1.0, 1.0, d, beta2).threshold
    batch_size = scale * threshold
    s = clip / batch_size
    nu = np.zeros(d)
    for _ in range(200):
        nu = beta2 * nu + (1 - beta2) * (g + s * rng.normal(size=d)) ** 2
    negative = np.mean(nu - s**2 < 0)
    assert theory.bias_correction_regime(batch_size, 1.0, d, beta2).trustworthy_if_same_direction == (scale >= 1)
    low, high = {0.25: (0.4, 0.65), 1.0: (0.1, 0.4), 4.0: (0.0, 0.01)}[scale]
    assert low <= negative <= high


@pytest.mark.parametrize(("n", "d", "epsilon"), [(60_000, 100, 1.0), (10**6, 10**9, 1.0), (5_000, 3000, 0.5)])
def test_accelerated_parameters_fulfill_the_conditions_and_no_larger_batch_does(n: int, d: int, epsilon: float) -> None:
    L, M, diam, delta = 2.0, 0.7, 3.0, 1e-6

    def fulfilled(B: int) -> bool:
        T = n // B
        beta = M + (8 * L + 16 * M * diam) * n**1.5 / (diam * B * B)
        bound = (B * beta * epsilon) ** 2 / (
            128 * M**2 * math.log2(T) ** 3 * math.log(4 * T / delta) * math.log(2.5 / delta)
        )
        return math.isqrt(n) >= B and d <= bound

    found = theory.accelerated_srgd_parameters(n, d, L, M, diam, epsilon, delta)
    assert found.batch_size == max(B for B in range(1, math.isqrt(n) + 1) if fulfilled(B))
    assert found.steps == n // found.batch_size
    assert found.steps >= 2
    assert found.beta == pytest.approx(M + (8 * L + 16 * M * diam) * n**1.5 / (diam * found.batch_size**2))
    assert found.beta >= 2 * M * found.steps  # claim 4.2
    assert found.max_grad_norm == 4 * L + 8 * M * diam


# Spectra of recorded sequences, against loops, periodograms and processes of known density.


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("steps", [1, 2, 9, 16, 17])
def test_autocorrelation_is_the_mean_of_inner_products(steps: int) -> None:
    s = noise(steps, 70)
    expected = [sum(s[t] @ s[t - lag] for t in range(lag, steps)) / steps for lag in range(steps)]
    assert spectrum.autocorrelation(s.astype(np.float32), steps - 1) == pytest.approx(expected, abs=1e-4)
    assert spectrum.autocorrelation(s, steps - 1) == pytest.approx(expected, abs=1e-10)


def test_all_lags_untapered_are_the_periodogram() -> None:
    s = noise(64, 3)
    density = spectrum.power_spectral_density(spectrum.autocorrelation(s, 63), np.arange(33) / 64, taper=False)
    _, expected = scipy.signal.periodogram(s, window="boxcar", detrend=False, scaling="spectrum", axis=0)
    expected = expected.sum(axis=1) * 64
    expected[1:-1] /= 2  # SciPy adds the negative frequencies
    assert density == pytest.approx(expected)


def test_the_tapered_density_is_not_negative_and_its_mean_is_the_power() -> None:
    s = noise(30, 2)
    phi = spectrum.autocorrelation(s, 9)
    fine = (np.arange(4000) + 0.5) / 8000
    assert spectrum.power_spectral_density(phi, fine).min() >= -1e-12
    assert spectrum.power_spectral_density(phi, fine).mean() == pytest.approx((s**2).sum() / 30, rel=1e-6)


@pytest.mark.parametrize("taper", [True, False])
def test_the_share_below_a_frequency_is_the_integral(taper: bool) -> None:
    phi = spectrum.autocorrelation(np.cumsum(noise(200, 3), axis=0), 50)
    middles = (np.arange(20_000) + 0.5) / 20_000 * 0.07
    integral = 2 * 0.07 * spectrum.power_spectral_density(phi, middles, taper=taper).mean()
    assert spectrum.share_below(phi, 0.07, taper=taper) == pytest.approx(integral / phi[0], rel=1e-6)
    assert spectrum.share_below(phi, 0.5, taper=taper) == pytest.approx(1)
    assert spectrum.share_below(phi, 0, taper=taper) == 0
    assert np.isnan(spectrum.share_below([0.0, 0.0], 0.1))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: spectrum.autocorrelation(np.ones(4), 1), r"shape \(4,\)"),
        (lambda: spectrum.autocorrelation(np.ones((0, 4)), 1), "at least one"),
        (lambda: spectrum.autocorrelation(np.array([["a"]]), 0), "real numbers"),
        (lambda: spectrum.autocorrelation(np.ones((4, 1)), 4), "max_lag=4: must be less than the number of steps, 4"),
        (lambda: spectrum.autocorrelation(np.array([[1.0], [np.nan]]), 0), "not finite"),
        (lambda: spectrum.power_spectral_density(np.ones((2, 2)), [0.1]), "must be"),
        (lambda: spectrum.share_below([1.0], 0.6), "frequency=0.6"),
        (lambda: spectrum.noise_floor(-1, 3), "noise_std=-1"),
        (lambda: negative_share([]), "is empty"),
        (lambda: negative_share([1, np.nan]), "NaN"),
        (lambda: recorded.fit_filter(np.ones((4, 2)), np.ones((4, 3)), 1), "the same for both"),
        (lambda: recorded.fit_filter(np.ones((4, 2)), np.ones((4, 2)), 3), "half of the 4 steps"),
        (lambda: recorded.signal_to_noise(np.ones((4, 2)), 0), "noise_std=0"),
    ],
)
def test_nonsense_is_refused(call: object, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        call()  # type: ignore[operator]


def test_negative_share_counts() -> None:
    assert negative_share(np.array([[-1.0, 0.0], [2.0, -0.0]], dtype=np.float32)) == 0.25


@pytest.mark.parametrize("width", [3, 1000])
def test_the_filter_is_read_off_its_inputs_and_outputs(width: int) -> None:
    g = noise(400, width, seed=5)
    y = scipy.signal.lfilter([0.1], [1, -0.9], g, axis=0)
    fitted = recorded.fit_filter(g.astype(np.float32), y.astype(np.float32), 128)
    assert fitted.kappa == pytest.approx(0.1 * 0.9 ** np.arange(128), abs=1e-4)
    assert fitted.residual < 1e-4
    # Something else than a filter shows in the residual.
    assert recorded.fit_filter(g, np.sign(g), 20).residual > 0.3
    assert recorded.fit_filter(g[:1], 2 * g[:1], 1).kappa == pytest.approx([2])


def test_signal_to_noise_before_and_after_a_filter() -> None:
    signal, s = 0.4, 2.0
    g = signal + s * noise(3000, 200, seed=6)
    kappa = 0.1 * 0.9 ** np.arange(128)
    y = scipy.signal.lfilter([0.1], [1, -0.9], g, axis=0)[200:]
    before = recorded.signal_to_noise(g[200:], s)
    after = recorded.signal_to_noise(y, s, kappa)
    assert abs(before.value - signal**2 / s**2) < 4 * before.error
    assert abs(after.value - signal**2 / (s**2 * 0.1 / 1.9)) < 6 * after.error
    # The error is that of repeated draws without signal.
    draws = [
        recorded.signal_to_noise(scipy.signal.lfilter([0.1], [1, -0.9], noise(300, 20, seed=k), axis=0)[100:], 1, kappa)
        for k in range(200)
    ]
    assert np.std([draw.value for draw in draws]) == pytest.approx(draws[0].error, rel=0.2)
    assert np.mean([draw.value for draw in draws]) == pytest.approx(0, abs=4 * draws[0].error / np.sqrt(200))


# Filters in numbers, against SciPy, against closed forms and against the backend that runs them.


FILTER_NAMES = sorted(NAMED_FILTERS)
CYCLES = np.linspace(0, 0.5, 101)


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


@pytest.mark.parametrize("name", FILTER_NAMES)
def test_the_responses_are_scipys(name: str) -> None:
    b, a = NAMED_FILTERS[name]
    stage = named_filter(name)
    kappa = scipy.signal.lfilter(b, [1, *a], impulse(80))
    ones = scipy.signal.lfilter(b, [1, *a], np.ones(80))
    assert filters.impulse_response(stage, 80) == pytest.approx(kappa, abs=1e-14)
    assert filters.impulse_response(stage, 80, start=17) == pytest.approx(kappa, abs=1e-14)
    assert filters.normalizers(stage, 80) == pytest.approx(ones, abs=1e-13)
    _, expected = scipy.signal.freqz(b, [1, *a], worN=2 * np.pi * CYCLES)
    assert filters.frequency_response(stage, CYCLES) == pytest.approx(expected, abs=1e-12)
    assert filters.gain(stage) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", FILTER_NAMES)
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
        (lambda: filters.Recurrence(()), "must have at least the coefficient b_0"),
    ],
)
def test_nonsense_about_filters_is_refused(call: Callable[[], object], said: str) -> None:
    refused(ArgumentError, said, call)
