"""Signal and noise in recorded gradients, before and after a filter, from released numbers only."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpcore.errors import ArgumentError
from dpcore.spec.validate import integer, positive

Floats = NDArray[np.float64]
# More equations than this say nothing new about a hundred unknowns.
_EQUATIONS = 40_000


class FittedFilter(NamedTuple):
    """A filter read off its inputs and outputs: the weights of the last inputs, the newest first, (lags,).

    `residual` is the root mean square of the output less the fit, over that of the output.
    """

    kappa: Floats
    residual: float


class Ratio(NamedTuple):
    """A signal-to-noise ratio, and the standard error that the noise alone gives it."""

    value: float
    error: float


def fit_filter(released: ArrayLike, filtered: ArrayLike, lags: int) -> FittedFilter:
    """Find the weights by which the outputs follow from the inputs, by least squares over the second half of a run.

    A linear filter weights every coordinate alike, so there are thousands of equations without noise for a hundred
    weights. If the filter is linear and has settled, the residual is that of rounding and of weights beyond `lags`. If
    the residual is large, do not use the weights: the filter is not linear, or longer than `lags`.

    Parameters
    ----------
    released, filtered : arrays of real numbers, shape (T, m)
        The filter's inputs and outputs.
    lags : int
        Number of weights, at most half of T.
    """
    inputs, outputs = np.asarray(released), np.asarray(filtered)
    if inputs.ndim != 2 or inputs.shape != outputs.shape or not inputs.size:
        raise ArgumentError(
            f"released, filtered: have shapes {inputs.shape} and {outputs.shape}; must be (T, m), the same for both"
        )
    steps, width = inputs.shape
    if integer(1, lags=lags) > max(1, steps // 2):
        raise ArgumentError(f"lags={lags}: must be at most half of the {steps} steps")
    wanted = max(1, min(steps - steps // 2, -(-_EQUATIONS // width)))
    rows = np.unique(np.linspace(max(steps // 2, lags - 1), steps - 1, wanted).round().astype(int))
    history = np.stack([inputs[rows - lag].astype(np.float64).ravel() for lag in range(lags)], axis=1)
    target = outputs[rows].astype(np.float64).ravel()
    kappa = np.linalg.lstsq(history, target, rcond=None)[0]
    size = float(np.sqrt(np.mean(target**2)))
    left = float(np.sqrt(np.mean((target - history @ kappa) ** 2)))
    return FittedFilter(kappa, left / size if size else 0.0)


def signal_to_noise(values: ArrayLike, noise_std: float, kappa: ArrayLike = (1.0,)) -> Ratio:
    """Return mean squared signal over mean squared noise, ``mean(values^2) / (s^2 sum kappa^2) - 1``, and its error.

    Signal is everything that is not the mechanism's noise: the gradient, and also the randomness of its batches. The
    ratio may be below 0 if there is almost no signal; its error is ``sqrt(2 / (T m) * sum_tau rho_tau^2)``,
    rho the autocorrelation of filtered white noise.

    Parameters
    ----------
    values : array of real numbers, shape (T, m)
        Recorded vectors, after the filter of weights `kappa`.
    noise_std : float
        s, the standard deviation of the noise before the filter, which was white.
    kappa : array of float, optional
        The filter's weights; none if not given.
    """
    recorded, weights = np.asarray(values, dtype=np.float64), np.asarray(kappa, dtype=np.float64)
    overlap = np.correlate(weights, weights, mode="full")
    noise = positive(noise_std=noise_std) ** 2 * float(weights @ weights)
    error = np.sqrt(2 / recorded.size * float(((overlap / overlap.max()) ** 2).sum()))
    return Ratio(float(np.mean(recorded**2)) / noise - 1, float(error))
