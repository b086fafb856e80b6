"""Toeplitz strategies: C[t, s] = c_{t-s}, a power series c(x) = sum c_k x^k, and C^{-1} the series 1/c(x).

The workload of plain SGD, all ones, is the series 1/(1-x). Its square root is a strategy in closed form:

    (1-x)^{-1/2}:  f_0 = 1,  f_k = f_{k-1} (2k-1)/(2k);      (1-x)^{1/2}:  g_0 = 1,  g_k = g_{k-1} (2k-3)/(2k).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.spec import validate
from dpcore.spec.ops import Correlation, FilterCoefficients, RingCoefficients
from dpcore.spec.recurrence import response
from dpcore.stages.strategies import base
from dpcore.stages.strategies.banded import nonzero, ring_of
from dpcore.stages.strategies.base import Indices, Matrix

_FILTERED = 4096


class Toeplitz(base.Settings):
    """What all Toeplitz strategies share; each gives the first columns of C and C^{-1}."""

    if TYPE_CHECKING:  # a property here would become the default of the subclasses' field

        @property
        def steps(self) -> int | None:
            """Rows it has; None for any number."""

    def first_column(self, steps: int) -> Matrix:
        """Return c_0 .. c_{steps-1}, (steps,), scaled."""
        raise NotImplementedError

    def inverse_first_column(self, steps: int) -> Matrix:
        """Return the first column of C^{-1}, (steps,)."""
        raise NotImplementedError

    def rows(self, step: int) -> tuple[tuple[int, float], ...]:
        """Return row `step` of C^{-1}, without its zeros."""
        weights = self.inverse_first_column(base.check_row(step, self.steps) + 1)[::-1]
        return nonzero(weights)

    def columns(self, indices: Indices, steps: int) -> Matrix:
        """Return columns of the leading block, (steps, len(indices))."""
        series = self.first_column(base.check_block(steps, self.steps))
        result = np.zeros((steps, len(indices)))
        for place, t in enumerate(indices):
            result[t:, place] = series[: steps - t]
        return result

    def inverse_row_norms(self, steps: int) -> Matrix:
        """Return the squared row norms of C^{-1}, (steps,): partial sums of its squared coefficients."""
        return np.cumsum(np.square(self.inverse_first_column(base.check_block(steps, self.steps))))


class Rational(Toeplitz):
    """C = P(x) / (norm Q(x)): the noise solves ``P N = norm Q Z``, with max(deg P, deg Q) state vectors."""

    def ratio(self) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Return the coefficients of P and of Q, Q_0 = 1 or P = 1, and the norm."""
        raise NotImplementedError

    @property
    def order(self) -> int:
        """The greater of the degrees of P and Q."""
        return max(map(len, self.ratio()[:2])) - 1

    def coefficients(self, step: int) -> Correlation:
        """Return b = Q, a_k = P_k / P_0 and the normalizer P_0 / norm, the same at every step."""
        base.check_row(step, self.steps)
        p, q, norm = self.ratio()
        return FilterCoefficients(q, tuple(value / p[0] for value in p[1:]), p[0] / norm)

    def first_column(self, steps: int) -> Matrix:
        """Return the series of P / (norm Q), (steps,)."""
        p, q, norm = self.ratio()
        return response(p, q, steps) / norm

    def inverse_first_column(self, steps: int) -> Matrix:
        """Return the series of norm Q / P, (steps,)."""
        p, q, norm = self.ratio()
        return response(q, p, steps) * norm


@dataclass(frozen=True)
class BandedToeplitz(Rational):
    """C with b bands, constant along each, for any number of steps; streams from a ring of b - 1 vectors.

    Parameters
    ----------
    series : sequence of float
        c_0 .. c_{b-1} up to their scale, c_0 > 0. As an attribute: scaled to norm 1, the norm of every column that is
        not cut off by the end of the run.
    """

    series: tuple[float, ...]
    steps: ClassVar[int | None] = None
    kind: ClassVar[str] = "banded-toeplitz"

    def __post_init__(self) -> None:
        values = checked_series(series=self.series)
        object.__setattr__(self, "series", tuple(base.scaled(values, _norm(values)).tolist()))

    def ratio(self) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Return c and 1."""
        return self.series, (1.0,), 1.0

    def coefficients(self, step: int) -> RingCoefficients:
        """Return the weights -c_j and the normalizer c_0 (see `dpcore.stages.strategies.banded`)."""
        t = base.check_row(step, self.steps)
        return ring_of([-value for value in self.series[1:]], t, self.series[0], "output")


@dataclass(frozen=True)
class SquareRoot(base.Redrawn, Toeplitz):
    """C = (1-x)^{-1/2}, the square root of the all-ones workload. Dense: N_t takes all of Z_0 .. Z_t, drawn again.

    A run of T steps draws T (T + 1) / 2 rows of noise and stores none of them.

    Parameters
    ----------
    steps : int
        Rows; the column norms grow with their number (as log T / pi), so the scale depends on it.
    """

    steps: int
    kind: ClassVar[str] = "square-root"

    def first_column(self, steps: int) -> Matrix:
        """Return f_k over the norm of f_0 .. f_{T-1}, (steps,)."""
        return root(-0.5, steps) / np.linalg.norm(root(-0.5, self.steps))

    def inverse_first_column(self, steps: int) -> Matrix:
        """Return g_k times that norm, (steps,)."""
        return root(0.5, self.steps)[:steps] * np.linalg.norm(root(-0.5, self.steps))


@dataclass(frozen=True)
class BandedInverseToeplitz(Rational):
    """C^{-1} with b bands, constant along each: N_t = sum_j p_j Z_{t-j}. C itself is dense.

    Streams from a ring of the last b - 1 rows of Z; or ``in_blocks(strategy, 1)`` draws b rows anew at each step and
    keeps nothing. C is not banded, so nothing that is proved for banded C (amplification under cyclic Poisson sampling)
    holds here.

    Parameters
    ----------
    series : sequence of float
        p_0 .. p_{b-1} up to their scale, p_0 > 0. As an attribute: scaled so that the first column of C, the largest,
        has norm 1.
    steps : int
        Rows; the scale depends on their number.
    """

    series: tuple[float, ...]
    steps: int
    kind: ClassVar[str] = "banded-inverse-toeplitz"

    def __post_init__(self) -> None:
        super().__post_init__()
        values = checked_series(series=self.series)
        with np.errstate(over="ignore", invalid="ignore"):
            norm = _norm(response((1.0,), tuple(values.tolist()), self.steps))
        if not np.isfinite(norm):
            raise ArgumentError(
                f"series={values.tolist()}: its reciprocal, the strategy, overflows within {self.steps} rows; "
                "the zeros of the polynomial must lie outside of the unit circle"
            )
        object.__setattr__(self, "series", tuple(base.scaled(values, 1.0 / norm).tolist()))

    def ratio(self) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Return 1 and p."""
        return (1.0,), self.series, 1.0

    def coefficients(self, step: int) -> RingCoefficients:
        """Return the weights p_j / p_0 and the normalizer 1 / p_0 of a ring of Z."""
        t, first = base.check_row(step, self.steps), self.series[0]
        return ring_of([value / first for value in self.series[1:]], t, 1 / first, "input")


@dataclass(frozen=True)
class Coefficients(base.Redrawn, Toeplitz):
    """C of any series. Dense: N_t takes all of Z_0 .. Z_t, drawn again.

    Parameters
    ----------
    series : sequence of float
        c_0 .. c_{T-1} up to their scale, c_0 > 0. As an attribute: scaled to norm 1, the norm of the first column.
    """

    series: tuple[float, ...]
    kind: ClassVar[str] = "toeplitz"

    def __post_init__(self) -> None:
        values = checked_series(series=self.series)
        object.__setattr__(self, "series", tuple(base.scaled(values, float(np.linalg.norm(values))).tolist()))

    @property
    def steps(self) -> int:
        """T."""
        return len(self.series)

    def first_column(self, steps: int) -> Matrix:
        """Return c, (steps,)."""
        return np.array(self.series[:steps])

    def inverse_first_column(self, steps: int) -> Matrix:
        """Return the series of 1/c, (steps,)."""
        return self._inverse[:steps]

    @cached_property
    def _inverse(self) -> Matrix:
        return reciprocal(np.array(self.series))


def banded_inverse_square_root(bands: int, steps: int) -> BandedInverseToeplitz:
    """Return the strategy whose inverse is the first `bands` coefficients of (1-x)^{1/2}, over `steps` rows.

    Their polynomial has no zero in the closed unit disk: all coefficients but the first are negative and they add up to
    more than 0, so ``|p(x)| >= p(|x|) >= p(1) > 0`` there. C is therefore summable however many rows it has.
    """
    bands = validate.integer(bands=bands, minimum=1)
    steps = validate.integer(steps=steps, minimum=1)
    if bands > steps:
        raise ArgumentError(f"bands={bands}: must be at most {steps}, the number of steps")
    return BandedInverseToeplitz(tuple(root(0.5, bands).tolist()), steps)


def _norm(values: Matrix) -> float:
    """Return the L2 norm, with the same bits on every machine: what a strategy is called by depends on it."""
    try:
        return math.sqrt(math.fsum(value * value for value in values.tolist()))
    except OverflowError:
        return math.inf


def checked_series(**values: Sequence[float]) -> Matrix:
    """Return the value as an array of coefficients, the first of them positive."""
    ((name, _),) = values.items()
    array = base.finite_array(1, **values)
    if array[0] <= 0:
        raise ArgumentError(
            f"{name}={array.tolist()}: the first coefficient is the diagonal and must be greater than 0 "
            "(otherwise the matrix is singular or its signs are turned)"
        )
    return array


@lru_cache(maxsize=32)
def root(power: float, size: int) -> Matrix:
    """Return the first coefficients of (1-x)^power, (size,), read-only: each the last times (k - 1 - power) / k."""
    k = np.arange(1, size)
    result = np.cumprod(np.concatenate([[1.0], (k - 1 - power) / k]))[:size]
    result.flags.writeable = False
    return result


def reciprocal(series: Matrix) -> Matrix:
    """Return the first coefficients of 1 / c(x), as many as are given.

    Newton's r <- r (2 - c r) doubles those that are right. Fourier transforms make it fast; their rounding is relative
    to the largest coefficients.
    """
    from scipy.signal import fftconvolve, lfilter

    size = len(series)
    if size <= _FILTERED:
        unit = np.zeros(size)
        unit[0] = 1.0
        filtered: Matrix = lfilter([1.0], series, unit)
        return filtered
    inverse = np.array([1 / series[0]])
    while len(inverse) < size:
        length = min(2 * len(inverse), size)
        product = fftconvolve(series[:length], inverse)[:length]
        inverse = 2 * np.pad(inverse, (0, length - len(inverse))) - fftconvolve(inverse, product)[:length]
    return inverse


def summed(c: Matrix, steps: int, epochs: int, period: int) -> Matrix:
    """Return ``s_t = sum_i c_{t - i period}``, (steps,)."""
    moved = np.zeros(steps)
    for first in range(0, min(epochs * period, steps), period):
        size = min(len(c), steps - first)
        moved[first : first + size] += c[:size]
    return moved


# Buffered linear Toeplitz strategies: dense matrices that stream with a few vectors.
#
# With scales w_j and decays u_j, j = 1..m, the series of C is that of a sum of m geometric sequences,
#
#     c_0 = 1,  c_k = sum_j w_j u_j^{k-1}:      c(x) = 1 + sum_j w_j x / (1 - u_j x) = P(x) / Q(x)
#
# with ``Q = prod_j (1 - u_j x)`` and ``P = Q + sum_j w_j x prod_{i != j} (1 - u_i x)``, both with constant term 1. So
# the noise N = C^{-1} Z solves ``P N = Q Z``: the recurrence with b the coefficients of Q, a those of P behind the 1,
# and m state vectors, the buffers.


@dataclass(frozen=True)
class BLT(Rational):
    """C of a buffered linear Toeplitz mechanism with m given buffers, scaled over `steps` rows.

    Parameters
    ----------
    scales : sequence of float
        w_1 .. w_m.
    decays : sequence of float
        u_1 .. u_m, each in [0, 1).
    steps : int
        Rows; the norm of the first column, by which C is divided, depends on their number.

    References
    ----------
    Dvijotham, McMahan, Pillutla, Steinke and Thakurta 2024, "Efficient and near-optimal noise generation for streaming
    differential privacy".
    """

    scales: tuple[float, ...]
    decays: tuple[float, ...]
    steps: int
    kind: ClassVar[str] = "blt"

    def __init__(self, scales: Sequence[float], decays: Sequence[float], steps: int) -> None:
        values = {"scales": base.finite_array(1, scales=scales), "decays": base.finite_array(1, decays=decays)}
        if len(values["scales"]) != len(values["decays"]):
            raise ArgumentError(
                f"len(decays)={len(values['decays'])}: must be {len(values['scales'])}, one for each of the scales"
            )
        for decay in values["decays"]:
            validate.decay(decays=float(decay))
        for name, array in values.items():
            object.__setattr__(self, name, tuple(array.tolist()))
        object.__setattr__(self, "steps", validate.integer(steps=steps, minimum=1))

    def ratio(self) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Return P, Q and the norm of c_0 .. c_{T-1}."""
        p, q = polynomials(self.scales, self.decays)
        return p, q, float(np.linalg.norm(response(p, q, self.steps)))


@lru_cache(maxsize=32)
def polynomials(scales: tuple[float, ...], decays: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return P and Q, coefficients of x^0 .. x^m."""
    factors = [np.array([1.0, -decay]) for decay in decays]
    q = reduce(np.convolve, factors, np.ones(1))
    p = q.copy()
    for j, scale in enumerate(scales):
        p[1:] += scale * reduce(np.convolve, factors[:j] + factors[j + 1 :], np.ones(1))
    return tuple(p.tolist()), tuple(q.tolist())
