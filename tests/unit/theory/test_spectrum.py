"""Spectra of recorded sequences, against loops, periodograms and processes of known density."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.signal

from dpcore.errors import ArgumentError
from dpcore.theory.analysis import recorded, spectrum
from dpcore.theory.analysis.moments import negative_share

FREQUENCIES = np.linspace(0, 0.5, 51)


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


def test_white_noise_is_flat_at_the_floor() -> None:
    s = 0.3 * noise(4000, 50)
    density = spectrum.power_spectral_density(spectrum.autocorrelation(s, 40), FREQUENCIES)
    floor = spectrum.noise_floor(0.3, 50)
    assert floor == pytest.approx(50 * 0.09)
    # Relative variance 0.54 max_lag / (T d) for Parzen's taper, twice that at the ends.
    assert density == pytest.approx(np.full(51, floor), rel=5 * np.sqrt(1.08 * 40 / (4000 * 50)))
    assert not np.allclose(density, 0.9 * floor, rtol=0.05)


def test_a_first_order_process_has_its_density() -> None:
    phi = 0.7
    s = scipy.signal.lfilter([1], [1, -phi], noise(6000, 40, seed=2), axis=0)[1000:]
    density = spectrum.power_spectral_density(spectrum.autocorrelation(s, 80), FREQUENCIES)
    expected = 40 / np.abs(1 - phi * np.exp(-2j * np.pi * FREQUENCIES)) ** 2
    assert density == pytest.approx(expected, rel=0.1)


def test_a_filter_multiplies_the_density_by_its_response_squared() -> None:
    b, a = [1 / 11, 1 / 11], [1, -9 / 11]
    s = noise(4000, 60, seed=4)
    before, after = (
        spectrum.power_spectral_density(spectrum.autocorrelation(x[200:], 200), FREQUENCIES[:-5])
        for x in (s, scipy.signal.lfilter(b, a, s, axis=0))
    )
    _, response = scipy.signal.freqz(b, a, worN=2 * np.pi * FREQUENCIES[:-5])
    assert after / before == pytest.approx(np.abs(response) ** 2, rel=0.05, abs=2e-5)


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
