"""The effect of a linear filter on a slow signal and on white noise, from its coefficients in float64."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpcore.errors import ArgumentError
from dpcore.spec.check import order_of
from dpcore.spec.ops import FilterCoefficients
from dpcore.spec.recurrence import advance, response
from dpcore.spec.validate import integer, number

Floats = NDArray[np.float64]

# The step from which on coefficients are taken to stay as they are.
LATE = 4096
_HALF_POWER = np.sqrt(0.5)


class Coefficients(Protocol):
    """The part of `dpcore.filters.Filter` that is needed here."""

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return the coefficients of each recurrence at step `step`."""


class Transfer(NamedTuple):
    """``H(z) = (b_0 + b_1 z^-1 + ...) / (1 + a_1 z^-1 + ...)``; `a` begins with the 1."""

    b: Floats
    a: Floats


@dataclass(frozen=True)
class Recurrence:
    """DOPPLER's recurrence, divided by c_t, taken as it is: also unstable, of any gain, or with a c_t of zero.

    `dpcore.filters.LowPass` refuses such filters; this class shows their effect, too. `b` is b_0..b_nb, and `a` is
    a_1..a_na, the leading 1 left out.
    """

    b: tuple[float, ...]
    a: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.b:
            raise ArgumentError("b=[]: must have at least the coefficient b_0")
        object.__setattr__(self, "b", tuple(number(b=value) for value in self.b))
        object.__setattr__(self, "a", tuple(number(a=value) for value in self.a))

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Return b, a and c_step, which may be zero or infinite."""
        size = max(64, 1 << step.bit_length())
        normalizers = response(self.b, (1.0, *self.a), size, to_ones=True)
        return (FilterCoefficients(self.b, self.a, float(normalizers[step])),)


def impulse_response(stage: Coefficients, steps: int, start: int = 0) -> Floats:
    """Return kappa: the undivided outputs from step `start` on to a 1 at step `start` and zeros elsewhere, (steps,).

    That is kappa_0..kappa_{steps-1}, before any division by normalizers. `start` matters only if the coefficients
    change.
    """
    steps, start = integer(1, steps=steps), integer(0, start=start)
    impulse = np.zeros((start + steps, 1))
    impulse[start] = 1
    return _run(stage, impulse, divide=False)[start:, 0]


def normalizers(stage: Coefficients, steps: int) -> Floats:
    """Return c_0..c_{steps-1}, shape (steps,): the undivided response to ones, by which DOPPLER divides.

    Of several recurrences in a row it is that of the row as a whole. (DOPPLER, Zhang et al., algorithm 1.)
    """
    return _run(stage, np.ones((integer(1, steps=steps), 1)), divide=False)[:, 0]


def weights(stage: Coefficients, steps: int) -> Floats:
    """Return W, shape (steps, steps), lower triangular: the filter's output at step t is ``sum_s W[t, s] g_s``.

    Divided by the normalizers, as the output is.
    """
    return _run(stage, np.eye(integer(1, steps=steps)), divide=True)


def noise_factor(stage: Coefficients, steps: int) -> Floats:
    """Return the share of white noise's variance in the output of each step: ``sum_s W[t, s]^2``, shape (steps,)."""
    return np.asarray((weights(stage, steps) ** 2).sum(axis=1))


def transfer(stage: Coefficients, step: int = LATE) -> Transfer:
    """Return H of the coefficients of step `step`, as if they had always held; recurrences in a row are multiplied.

    The normalizers of DOPPLER's filters tend to the gain, which is 1, and are left out.
    """
    b: Floats = np.ones(1)
    a: Floats = np.ones(1)
    for item in stage.coefficients(integer(0, step=step)):
        b = np.asarray(np.polymul(b, np.asarray(item.b)), dtype=np.float64)
        a = np.asarray(np.polymul(a, np.asarray((1.0, *item.a))), dtype=np.float64)
    return Transfer(b, a)


def frequency_response(stage: Coefficients | Transfer, frequencies: ArrayLike) -> NDArray[np.complex128]:
    """Return ``H(exp(2 pi i f))`` at frequencies f in cycles per step, from 0 to 0.5; complex128 of their shape.

    A component of frequency f repeats every 1/f steps. A filter whose coefficients change is taken as it is at a late
    step. The response is infinite at a pole on the unit circle.
    """
    b, a = _transfer(stage)
    z = np.exp(-2j * np.pi * np.asarray(frequencies, dtype=np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        response: Any = np.polyval(b[::-1], z) / np.polyval(a[::-1], z)
    return np.asarray(response, dtype=np.complex128)


def gain(stage: Coefficients | Transfer) -> float:
    """Return H at frequency 0, ``sum b / (1 + sum a)``: the filter's factor on a constant in the long run."""
    b, a = _transfer(stage)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(b.sum() / a.sum())


def poles(stage: Coefficients | Transfer) -> NDArray[np.complex128]:
    """Return the roots of ``z^na + a_1 z^(na-1) + ...``, largest modulus first; stable if all have ``|z| < 1``."""
    roots = np.roots(_transfer(stage).a).astype(np.complex128)
    return np.asarray(sorted(roots, key=lambda root: (-abs(root), -root.imag)), dtype=np.complex128)


def is_stable(stage: Coefficients | Transfer) -> bool:
    """Return whether every pole is strictly inside the unit circle."""
    return bool(np.all(np.abs(poles(stage)) < 1))


def limiting_noise_factor(stage: Coefficients | Transfer) -> float:
    """Return ``sum_tau kappa_tau^2``, the noise factor in the long run; infinite for an unstable filter.

    With the state x_{t+1} = A x_t + e_1 g_t, the sum is b_0^2 + C P C^T, where P solves P = A P A^T + e_1 e_1^T.
    """
    from scipy.linalg import solve_discrete_lyapunov

    b, a = _transfer(stage)
    if not is_stable(stage):
        return float("inf")
    size = max(len(a), len(b)) - 1
    if size == 0:
        return float(b[0] ** 2)
    b, a = np.pad(b, (0, size + 1 - len(b))), np.pad(a, (0, size + 1 - len(a)))
    power = np.eye(size, k=-1)
    power[0] = -a[1:]
    output, first = b[1:] - b[0] * a[1:], np.eye(size, 1)
    return float(b[0] ** 2 + output @ solve_discrete_lyapunov(power, first @ first.T, method="direct") @ output)


def delay(stage: Coefficients | Transfer) -> float:
    """Return the mean age ``sum tau kappa_tau / sum kappa_tau`` of the output's inputs, in steps.

    It is the group delay at frequency 0: a slow signal comes out this much later. NaN for an unstable filter or one of
    gain 0.
    """
    b, a = _transfer(stage)
    if not is_stable(stage) or gain(stage) == 0:
        return float("nan")
    return float((np.arange(len(b)) @ b) / b.sum() - (np.arange(len(a)) @ a) / a.sum())


def half_life(stage: Coefficients | Transfer) -> float:
    """Return in how many steps the slowest part of the memory halves, ``log 2 / -log |p|`` of the largest pole p.

    0 if the only pole is zero (the memory ends after nb steps); infinite for an unstable filter.
    """
    largest = float(np.abs(poles(stage)).max(initial=0))
    if largest >= 1:
        return float("inf")
    return float(np.log(0.5) / np.log(largest)) if largest > 0 else 0.0


def cutoff(stage: Coefficients | Transfer, points: int = 4097) -> float:
    """Return the lowest frequency, in cycles per step, at which ``|H| <= |H(0)| / sqrt 2``: half the power.

    NaN if ``|H|`` stays above, or the filter is unstable or has gain 0. `points` frequencies are checked before the
    crossing is bisected.
    """
    level = _HALF_POWER * abs(gain(stage))
    if not is_stable(stage) or level == 0:
        return float("nan")
    frequencies = np.linspace(0, 0.5, integer(2, points=points))
    below = np.abs(frequency_response(stage, frequencies)) <= level
    if not below.any():
        return float("nan")
    high = frequencies[below.argmax()]
    low = high - frequencies[1]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if abs(frequency_response(stage, middle)) <= level else (middle, high)
    return float(high)


def snr(autocorrelation: ArrayLike, impulse_response: ArrayLike) -> float:
    """Return DOPPLER's normalized SNR, ``(sum_t sum_tau<=t c_tau kappa_tau) / (sum_t sum_tau<=t kappa_tau^2)``, t < T.

    Parameters
    ----------
    autocorrelation : array of float, shape (T,)
        c_0..c_{T-1}: normalized autocorrelation of the gradient. c_0 = 1/2: the SNR is 1/2 without a filter.
    impulse_response : array of float, shape (T,)
        kappa_0..kappa_{T-1}, not all zero.

    References
    ----------
    DOPPLER (Zhang et al.), equation 4.
    """
    c, kappa = np.asarray(autocorrelation, dtype=np.float64), np.asarray(impulse_response, dtype=np.float64)
    if c.ndim != 1 or c.shape != kappa.shape or not c.size:
        raise ArgumentError(
            f"autocorrelation, impulse_response: have shapes {c.shape} and {kappa.shape}; must be (T,), the same T"
        )
    # Lag tau is in the sums of steps tau..T-1.
    times = np.arange(len(c), 0, -1)
    noise = times @ kappa**2
    if noise == 0:
        raise ArgumentError("impulse_response: is zero everywhere; the filter's output is always 0")
    return float(times @ (c * kappa) / noise)


def _transfer(stage: Coefficients | Transfer) -> Transfer:
    return stage if isinstance(stage, Transfer) else transfer(stage)


def _run(stage: Coefficients, inputs: Floats, *, divide: bool) -> Floats:
    """Run the recurrences over the rows of `inputs`; unstable ones may overflow."""
    order = sum(map(order_of, stage.coefficients(0)))
    state = [np.zeros_like(inputs[0]) for _ in range(order)]
    with np.errstate(all="ignore"):
        return np.stack([advance(x, state, stage.coefficients(t), divide=divide) for t, x in enumerate(inputs)])
