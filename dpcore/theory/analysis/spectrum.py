"""The power spectral density of a recorded sequence of released vectors."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpcore.errors import ArgumentError
from dpcore.spec.validate import integer, non_negative

Floats = NDArray[np.float64]
# Coordinates whose transforms are in memory at once: 64 of 10,000 steps take 20 MB.
_COLUMNS = 64


def autocorrelation(sequence: ArrayLike, max_lag: int) -> Floats:
    """Return ``phi_tau = (1/T) sum_{t >= tau} <s_t, s_{t-tau}>`` for tau = 0..max_lag: (max_lag + 1,) float64.

    It is the biased estimate of E<s_t, s_{t-tau}>, a sum over coordinates: white noise of standard deviation s has
    phi_0 = d s^2 and 0 elsewhere. The biased estimate (1/T at every lag) is positive semidefinite, so that its Fourier
    transform is not negative.

    Parameters
    ----------
    sequence : array of real numbers, shape (T, d)
        One released vector a step, none of them NaN or infinite.
    max_lag : int
        Less than T.
    """
    values = np.asarray(sequence)
    if values.ndim != 2 or not values.size or values.dtype.kind not in "fiu":
        raise ArgumentError(
            f"sequence: has shape {values.shape} and type {values.dtype}; must be (T, d), real numbers, at least one"
        )
    steps = len(values)
    if integer(0, max_lag=max_lag) >= steps:
        raise ArgumentError(f"max_lag={max_lag}: must be less than the number of steps, {steps}")
    if not np.isfinite(values).all():
        raise ArgumentError("sequence: has values that are not finite; leave those steps out")
    size = 1 << (steps + max_lag - 1).bit_length()
    power = np.zeros(size // 2 + 1)
    for first in range(0, values.shape[1], _COLUMNS):
        part = values[:, first : first + _COLUMNS].astype(np.float64)
        power += (np.abs(np.fft.rfft(part, n=size, axis=0)) ** 2).sum(axis=1)
    return np.asarray(np.fft.irfft(power, n=size)[: max_lag + 1] / steps)


def power_spectral_density(autocorrelation: ArrayLike, frequencies: ArrayLike, *, taper: bool = True) -> Floats:
    """Return ``P(f) = sum_tau w_tau phi_tau exp(-2 pi i f tau)`` over tau = -max_lag..max_lag: (F,) float64.

    Its mean over f in [-0.5, 0.5] is phi_0, the mean squared norm. White noise has P = d s^2 at every frequency.

    Parameters
    ----------
    autocorrelation : array of float, shape (max_lag + 1,)
        phi_0..phi_max_lag; phi of a real sequence is symmetric in tau.
    frequencies : array of float, shape (F,)
        f in cycles per step, in [0, 0.5].
    taper : bool, optional
        Whether far lags, which are known the least, count less: Parzen's w_tau instead of 1. The tapered density of a
        biased estimate is never negative, beyond rounding, and a strong peak spills little into other frequencies.

    References
    ----------
    DOPPLER (Zhang et al.), section 3. The taper: Parzen, Mathematical considerations in the estimation of spectra,
    1961.
    """
    phi = np.asarray(autocorrelation, dtype=np.float64)
    if phi.ndim != 1 or not phi.size:
        raise ArgumentError(f"autocorrelation: has shape {phi.shape}; must be (max_lag + 1,)")
    lags = np.arange(len(phi))
    weight = np.where(lags == 0, 1.0, 2.0) * (_parzen(len(phi)) if taper else 1.0)
    angles = 2 * np.pi * np.outer(np.asarray(frequencies, dtype=np.float64), lags)
    return np.asarray(np.cos(angles) @ (weight * phi))


def share_below(autocorrelation: ArrayLike, frequency: float, *, taper: bool = True) -> float:
    """Return the share of all power at frequencies in [-f, f], f at most 0.5 cycles per step: for white noise 2 f.

    It is the density of `power_spectral_density`, integrated exactly: ``2 f w_0 phi_0 + 2 sum_tau w_tau phi_tau
    sin(2 pi f tau) / (pi tau)``, over phi_0. NaN for a sequence of zeros.
    """
    phi = np.asarray(autocorrelation, dtype=np.float64)
    if non_negative(frequency=frequency) > 0.5:
        raise ArgumentError(f"frequency={frequency!r}: must be at most 0.5 cycles per step")
    if phi[0] == 0:
        return float("nan")
    lags = np.arange(1, len(phi))
    weight = _parzen(len(phi))[1:] if taper else np.ones(len(lags))
    terms = weight * phi[1:] * np.sin(2 * np.pi * frequency * lags) / (np.pi * lags)
    return float((2 * frequency * phi[0] + 2 * terms.sum()) / phi[0])


def noise_floor(noise_std: float, dimension: int) -> float:
    """Return ``d s^2``, the density of white noise of standard deviation s in each of d coordinates."""
    return integer(1, dimension=dimension) * non_negative(noise_std=noise_std) ** 2


def _parzen(size: int) -> Floats:
    """Return w_0..w_{size-1}: two triangles convolved, so that the transform is a fourth power and not negative."""
    x = np.arange(size) / size
    return np.where(x <= 0.5, 1 - 6 * x**2 + 6 * x**3, 2 * (1 - x) ** 3)
