"""DiSK's scalar Kalman filter, whose weight follows from the variances, and the full one, **not private**."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.spec.ops import FilterCoefficients
from dpcore.spec.validate import integer, non_negative, plain
from dpcore.theory.papers import Variances, kappa_from_variances, variances

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class ScalarKalman:
    """``g~_t = (1 - k_t) g~_{t-1} + k_t g_t`` with ``g~_0 = g_0`` and the Kalman gain k_t.

    The gain follows ``k_t = (p + sH + sv) / (p + sw + sv)``, ``p <- (1 - k_t) (p + sH + sv)`` with sX for sigma_X^2,
    and converges to `kappa`, at which this is `Averaging(kappa)`.

    Parameters
    ----------
    sigma_H : float
        Standard deviation, per coordinate, of the error of the Hessian's displacement product; at most sigma_w.
    sigma_v : float
        That of the gradient's own motion between two steps, which the product does not predict.
    sigma_w : float
        That of the noise in a released average (of sampling and of privacy).
    initial_variance : float, optional
        p before the first step; the paper's sigma_w^2 by default.

    Notes
    -----
    The predicted part, ``H d``, enters through the query: give this filter to `dpcore.queries.TwoPoint` as its kappa.
    k_0 moves p on but weighs nothing, since ``g~_{-1} := g_0``.

    References
    ----------
    DiSK (Zhang et al.), section 3.2 and appendix A.
    """

    sigma_H: float
    sigma_v: float
    sigma_w: float
    initial_variance: float | None = None
    order: ClassVar[int] = 1
    adaptive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        plain(self)
        variances(self.sigma_H, self.sigma_v, self.sigma_w)
        if self.initial_variance is not None:
            non_negative(initial_variance=self.initial_variance)

    @property
    def kappa(self) -> float:
        """The gain that k_t settles at."""
        return kappa_from_variances(self.sigma_H, self.sigma_v, self.sigma_w)

    def gain(self, step: int) -> float:
        """Return k_step, in (0, 1]."""
        size = max(64, 1 << integer(0, step=step).bit_length())
        s = variances(self.sigma_H, self.sigma_v, self.sigma_w)
        p = s.w if self.initial_variance is None else self.initial_variance / s.unit / s.unit
        return _gains(s, p, size)[step]

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return b = (k_step,), or (1,) at the first step, and a = (-(1 - k_{step+1}),), which acts in the next one."""
        return (FilterCoefficients((1.0 if step == 0 else self.gain(step),), (self.gain(step + 1) - 1,)),)


@lru_cache(maxsize=64)
def _gains(s: Variances, p: float, size: int) -> tuple[float, ...]:
    """Return k_0..k_{size-1}."""
    gains = []
    for _ in range(size):
        predicted = p + s.H + s.v
        k = predicted / (p + s.w + s.v)
        p = (s.w - s.H) / (p + s.w + s.v) * predicted
        gains.append(k)
    return tuple(gains)


class FullKalman:
    """The filter of DiSK's algorithm 2 for small d, for study and as an oracle. **Not private**.

    It reads the Hessian of the private data, through H d, and adds no noise to it: anything computed from its estimates
    has epsilon = infinity. It is therefore no filter of `dpcore.Method`.
    `ScalarKalman` with the query `TwoPoint` is the private method.

    Each step costs d^3 operations:

        g~_{t|t-1} = g~_{t-1} + H_t d_{t-1},     P_{t|t-1} = P_{t-1} + S_H + S_v,     S_t = g~_{t|t-1} g~_{t|t-1}'
        K_t = P_{t|t-1} C' (S_w + C (S_C S_t + P_{t|t-1}) C' - S_H)^{-1}
        g~_t = g~_{t|t-1} + K_t (g_t - C g~_{t|t-1}),     P_t = (I - K_t C) P_{t|t-1}

    Parameters
    ----------
    dimension : int
        d.
    hessian_covariance, motion_covariance, noise_covariance : float or (d, d) array
        S_H, of the error of the Hessian's displacement product; S_v, of the gradient's own motion; S_w, of the noise
        in a released average. A number means that multiple of the identity, here and below. ``S_w - S_H`` must have no
        negative eigenvalue, otherwise the gain would exceed the identity.
    observation, observation_covariance : float or (d, d) array
        E[C], the mean effect of clipping, and S_C, its spread.
    initial_estimate : (d,) array, optional
        g~ before the first step, 0 by default; P is S_w then.
    allow_nonprivate : bool
        Must be True.

    Attributes
    ----------
    estimate, covariance, gain : float64 arrays
        g~_t (d,), P_t and K_t (d, d); K is 0 before the first step.

    Raises
    ------
    PrivacyError
        Without ``allow_nonprivate=True``.
    ArgumentError
        If an array has another shape or is not finite, or a covariance is none.

    References
    ----------
    DiSK (Zhang et al.), algorithm 2. Its line 8 uses g~_t before it exists; here it is g~_{t|t-1}, and S_v, of its
    section 3.1, is in line 7.
    """

    def __init__(
        self,
        dimension: int,
        *,
        hessian_covariance: ArrayLike,
        motion_covariance: ArrayLike,
        noise_covariance: ArrayLike,
        observation: ArrayLike = 1.0,
        observation_covariance: ArrayLike = 0.0,
        initial_estimate: ArrayLike | None = None,
        allow_nonprivate: bool = False,
    ) -> None:
        if allow_nonprivate is not True:
            raise PrivacyError(
                "allow_nonprivate=False: this filter reads Hessians of private data without noise, so that epsilon is "
                "infinity; use ScalarKalman with the query TwoPoint, or pass allow_nonprivate=True for study"
            )
        d = self.dimension = integer(1, dimension=dimension)
        self._S_H = self._array((d, d), hessian_covariance=hessian_covariance)
        self._S_v = self._array((d, d), motion_covariance=motion_covariance)
        self._S_w = self._array((d, d), noise_covariance=noise_covariance)
        self._C = self._array((d, d), "", observation=observation)
        self._S_C = self._array((d, d), observation_covariance=observation_covariance)
        largest = max(np.abs(self._S_w).max(), np.abs(self._S_H).max())
        if np.linalg.eigvalsh(self._S_w - self._S_H).min() < -1e-12 * largest:
            raise ArgumentError(
                "hessian_covariance: must not exceed noise_covariance in any direction, or the gain would exceed 1"
            )
        self.covariance = self._S_w
        start = np.zeros(d) if initial_estimate is None else initial_estimate
        self.estimate = self._array((d,), initial_estimate=start)
        self.gain: Matrix = np.zeros((d, d))

    def step(self, gradient: ArrayLike, displacement_product: ArrayLike) -> Matrix:
        """Take in one released average and return the estimate g~_t, (d,) float64.

        Parameters
        ----------
        gradient : (d,) array
            g_t, the private average.
        displacement_product : (d,) array
            ``H_t d_{t-1}``, from private data; zeros at the first step.
        """
        C, S_H, size = self._C, self._S_H, (self.dimension,)
        g = self._array(size, gradient=gradient)
        predicted = self.estimate + self._array(size, displacement_product=displacement_product)
        P = self.covariance + S_H + self._S_v
        S = np.outer(predicted, predicted)
        innovation = self._S_w + C @ (self._S_C @ S + P) @ C.T - S_H
        try:
            self.gain = np.asarray(np.linalg.solve(innovation.T, C @ P.T).T, dtype=np.float64)
        except np.linalg.LinAlgError as cause:
            raise ArgumentError(
                "noise_covariance: S_w + E[C] (S_C S + P) E[C]' - S_H must not be singular; take a greater S_w"
            ) from cause
        self.estimate = predicted + self.gain @ (g - C @ predicted)
        self.covariance = P - self.gain @ C @ P
        return self.estimate.copy()

    @staticmethod
    def _array(shape: tuple[int, ...], kind: str = "covariance", **values: ArrayLike) -> Matrix:
        """Return a finite vector or matrix; a number is a multiple of the identity. Covariances are semi-definite."""
        ((name, value),) = values.items()
        array = np.array(value, dtype=np.float64)
        square = len(shape) == 2
        if array.shape not in ((shape, ()) if square else (shape,)) or not np.isfinite(array).all():
            number = "a finite number or " if square else ""
            raise ArgumentError(f"{name}: must be {number}a finite array of shape {shape}")
        if not square:
            return array
        matrix = array if array.ndim else array * np.eye(shape[0])
        largest = np.abs(matrix).max()
        if kind and (
            not np.allclose(matrix, matrix.T, rtol=0, atol=1e-12 * largest)
            or np.linalg.eigvalsh(matrix).min() < -1e-12 * largest
        ):
            raise ArgumentError(f"{name}: must be symmetric with no negative eigenvalue, as covariances are")
        return matrix
