"""Kinds of strategies: matrices by bands, dense ones and trees, Toeplitz ones; and their names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.spec.ops import Correlation, FilterCoefficients, RingCoefficients
from dpcore.spec.recurrence import response
from dpcore.stages.strategies import base
from dpcore.stages.strategies.base import Indices, Matrix, Strategy, check_rows, check_steps

# Banded strategies that may change from step to step; the identity has one band.
#
# Streaming. Row t of C N = Z reads C[t,t] N_t + sum_j C[t,t-j] N_{t-j} = Z_t, so that
#
#     N_t = (Z_t - sum_{0<j<b} C[t,t-j] N_{t-j}) / C[t,t]:
#
# step t needs row t of C and a ring of the last b - 1 vectors N (`dpcore.spec.ops.RingCoefficients`). It reads all of
# them and writes one. C^{-1} itself is dense; cut to b entries a row it would be another strategy, with another
# sensitivity.


@dataclass(frozen=True)
class Identity(base.Whole):
    """C = I: the noise of each step is its own row of Z. DP-SGD is this matrix mechanism."""

    order: ClassVar[int] = 0
    steps: ClassVar[int | None] = None

    def coefficients(self, step: int) -> FilterCoefficients:
        """Return the recurrence that changes nothing."""
        base.check_row(step, None)
        return FilterCoefficients((1.0,), ())

    def rows(self, step: int) -> tuple[tuple[int, float], ...]:
        """Return the row itself."""
        return ((base.check_row(step, None), 1.0),)

    def columns(self, indices: Indices, steps: int) -> Matrix:
        """Return columns of the identity, (steps, len(indices))."""
        return np.equal.outer(np.arange(steps), indices).astype(np.float64)

    def inverse_row_norms(self, steps: int) -> Matrix:
        """Return ones, (steps,)."""
        return np.ones(steps)

    def describe(self) -> dict[str, Any]:
        """Return the kind."""
        return {"kind": "identity"}


@dataclass(frozen=True)
class Banded(base.Whole):
    """A lower-triangular matrix with b bands: C[t, s] = 0 for t - s >= b.

    Streams from a ring of b - 1 vectors of the parameters' size; they are as secret as the noise.

    Parameters
    ----------
    bands : (b, T) array
        The columns of C from the diagonal down, up to their common scale: ``bands[k, t] = C[t + k, t]``, 0 where
        t + k >= T. As an attribute: float64, read-only, scaled so that the largest column norm is 1.

    Attributes
    ----------
    sha256 : str
        Digest of `bands`; two strategies are equal when theirs are.
    """

    bands: Matrix = field(compare=False, repr=False)
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        bands = base.finite_array(2, bands=self.bands)
        count, steps = bands.shape
        if count > steps:
            raise ArgumentError(f"bands.shape={bands.shape}: must be (b, T) with at most T = {steps} bands")
        base.check_diagonal(bands[0], "bands")
        beyond = np.add.outer(np.arange(count), np.arange(steps)) >= steps
        if bands[beyond].any():
            k, t = (int(i) for i in np.argwhere(beyond & (bands != 0))[0])
            raise ArgumentError(f"bands: the entry at ({k}, {t}) is in row {t + k} of {steps} and must be 0")
        bands = base.scaled(bands, float(np.linalg.norm(bands, axis=0).max()))
        object.__setattr__(self, "bands", bands)
        object.__setattr__(self, "sha256", base.digest(bands))

    @classmethod
    def from_matrix(cls, matrix: npt.ArrayLike) -> "Banded":
        """Return the strategy of a (T, T) array, C up to its scale, with as many bands as have an entry."""
        full = base.lower_triangular(matrix=matrix)
        bands = np.zeros((band_count(full), len(full)))
        for k, band in enumerate(bands):
            band[: len(full) - k] = np.diagonal(full, -k)
        return cls(bands)

    @property
    def order(self) -> int:
        """The bands but the diagonal: b - 1."""
        return len(self.bands) - 1

    @property
    def steps(self) -> int:
        """T."""
        return int(self.bands.shape[1])

    def coefficients(self, step: int) -> RingCoefficients:
        """Return the weights -C[t,t-j] and the normalizer C[t,t]: see above."""
        t = base.check_row(step, self.steps)
        weights = [-float(self.bands[j, t - j]) if j <= t else 0.0 for j in range(1, len(self.bands))]
        return ring_of(weights, t, float(self.bands[0, t]), "output")

    def rows(self, step: int) -> tuple[tuple[int, float], ...]:
        """Return the dense row of C^{-1}: for study, the recurrence streams it."""
        from scipy.linalg import solve_banded

        size = base.check_row(step, self.steps) + 1
        target = np.zeros(size)
        target[step] = 1.0
        # C^T w = e_step. The transpose is upper banded, and `solve_banded` stores band k of it from column k on.
        count = min(len(self.bands), size)
        upper = np.zeros((count, size))
        for k in range(count):
            upper[count - 1 - k, k:] = self.bands[k, : size - k]
        weights = solve_banded((0, count - 1), upper, target)
        return nonzero(weights)

    def columns(self, indices: Indices, steps: int) -> Matrix:
        """Return columns of the leading block, (steps, len(indices))."""
        base.check_block(steps, self.steps)
        result = np.zeros((steps, len(indices)))
        for place, t in enumerate(indices):
            size = min(len(self.bands), steps - t)
            result[t : t + size, place] = self.bands[:size, t]
        return result

    def inverse_row_norms(self, steps: int) -> Matrix:
        """Return the squared row norms of C^{-1}, (steps,): time steps x bands^2, nothing of size steps^2.

        Notes
        -----
        They are the variances of N_t = (Z_t - v N_past) / c with v = C[t, t-b+1 .. t-1], c = C[t,t]. Z_t is independent
        of N_past, whose covariance W is known from the steps before: ``Var N_t = (1 + v W v) / c^2`` and
        ``Cov(N_past, N_t) = -W v / c``, which fills the window of the next step. Sums of squares only: nothing cancels.
        """
        base.check_block(steps, self.steps)
        past = self.order
        result = np.empty(steps)
        window = np.zeros((past + 1, past + 1))  # covariance of N_{t-past} .. N_t
        for t in range(steps):
            window[:-1, :-1] = window[1:, 1:].copy()
            v = np.zeros(past)
            for k in range(1, min(past, t) + 1):
                v[past - k] = self.bands[k, t - k]
            c = self.bands[0, t]
            cross = window[:-1, :-1] @ v
            result[t] = (1.0 + v @ cross) / c**2
            window[:-1, -1] = window[-1, :-1] = -cross / c
            window[-1, -1] = result[t]
        return result

    def describe(self) -> dict[str, Any]:
        """Return the kind, the sizes and the digest of the bands."""
        return {"kind": "banded", "bands": len(self.bands), "steps": self.steps, "sha256": self.sha256}


def nonzero(weights: Matrix) -> tuple[tuple[int, float], ...]:
    """Return a row of C^{-1} as (row of Z, weight) pairs, zeros left out."""
    rows = np.flatnonzero(weights)
    return tuple(zip(rows.tolist(), weights[rows].tolist(), strict=True))


def ring_of(weights: Sequence[float], step: int, normalizer: float, keeps: str) -> RingCoefficients:
    """Return step `step` of a ring: its place is the step modulo the number of vectors."""
    return RingCoefficients(tuple(weights), step % max(len(weights), 1), normalizer, keeps)


def band_count(matrix: Matrix) -> int:
    """Return the number of bands of a lower-triangular matrix, including the diagonal."""
    row, column = np.nonzero(matrix)
    return int((row - column).max()) + 1


# Strategies with every entry of the triangle: rows of Z are drawn again at each step.


# With more state vectors of the parameters' size than this, rows are drawn again instead.
MOST_BANDS = 64


class Redrawn(base.Redrawn):
    """A strategy whose noise is made of rows of Z that are drawn again; the matrix C is `entries`."""

    if TYPE_CHECKING:
        steps: int
        entries: Matrix

    @cached_property
    def _inverse(self) -> Matrix:
        from scipy.linalg import solve_triangular

        return np.tril(solve_triangular(self.entries, np.eye(self.steps), lower=True))

    def rows(self, step: int) -> tuple[tuple[int, float], ...]:
        """Return row `step` of C^{-1}, without its zeros."""
        weights = self._inverse[base.check_row(step, self.steps)]
        return nonzero(weights)

    def matrix(self, steps: int) -> Matrix:
        """Return the leading block of C, (steps, steps) float64."""
        size = base.check_block(steps, self.steps)
        return self.entries[:size, :size]

    def columns(self, indices: Indices, steps: int) -> Matrix:
        """Return columns of the leading block, (steps, len(indices))."""
        return np.ascontiguousarray(self.matrix(steps)[:, indices])

    def inverse_row_norms(self, steps: int) -> Matrix:
        """Return the squared row norms of C^{-1}, (steps,)."""
        result: Matrix = np.square(self._inverse[: base.check_block(steps, self.steps)]).sum(axis=1)
        return result


@dataclass(frozen=True)
class Dense(Redrawn):
    """Any lower-triangular matrix.

    N_t is a sum over all of Z_0 .. Z_t, which are drawn again: a run of T steps draws T (T + 1) / 2 rows of noise
    instead of T, and stores none of them. The matrix and its inverse take 16 T^2 bytes.

    Parameters
    ----------
    entries : (T, T) array
        C up to its scale. As an attribute: float64, read-only, scaled so that the largest column norm is 1.

    Attributes
    ----------
    sha256 : str
        Digest of `entries`; two strategies are equal when theirs are.
    """

    entries: Matrix = field(compare=False, repr=False)
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        entries = base.lower_triangular(entries=self.entries)
        entries = base.scaled(entries, float(np.linalg.norm(entries, axis=0).max()))
        object.__setattr__(self, "entries", entries)
        object.__setattr__(self, "sha256", base.digest(entries))

    @property
    def steps(self) -> int:  # type: ignore[override]
        """T."""
        return len(self.entries)

    def describe(self) -> dict[str, Any]:
        """Return the kind, the size and the digest of the entries."""
        return {"kind": "dense", "steps": self.steps, "sha256": self.sha256}


def from_matrix(matrix: npt.ArrayLike) -> Banded | Dense:
    """Return the strategy of a (T, T) array: `Banded` if it has few bands, else `Dense`.

    Few is at most `MOST_BANDS` and fewer than T/2, the rows that a step of `Dense` draws on average.
    """
    full = base.lower_triangular(matrix=matrix)
    bands = band_count(full)
    few = bands == 1 or (bands <= MOST_BANDS and 2 * bands < len(full))
    return Banded.from_matrix(full) if few else Dense(full)


# Noise of a binary tree (DP-FTRL's first mechanism) as a square, lower-triangular strategy.
#
# Steps count from 1 here. Node t of the naive tree covers (t - lowbit(t), t], lowbit(t) the largest power of two that
# divides t; row t of the 0/1 matrix C marks it. The prefix 1 .. t is the disjoint union of the nodes t, t - lowbit(t),
# and so on, one for each binary digit 1 of t: with D the 0/1 matrix of these nodes and A the matrix of prefix sums, A =
# D C. So the noise on the prefix sums is A C^{-1} Z = D Z, the sum of the noise of the prefix's own nodes. It is not
# normalized: noise on prefix t has popcount(t) times the variance of a node.
#
# Streaming. C^{-1} = A^{-1} D: N_t is the noise of prefix t less that of prefix t - 1. With lowbit(t) = 2^k the
# prefixes share the nodes up to t - 2^k; t - 1 = (t - 2^k) + 2^{k-1} + ... + 1 has k further nodes, namely
# t - 1, t - 2, t - 4, ..., t - 2^{k-1}, so that
#
#     N_t = Z_t - sum_{i<k} Z_{t - 2^i},        at most 1 + floor(log2 T) rows of Z; only Z_t is new.
#
# An example of step t moves the nodes that cover t: t, t + lowbit(t), ..., at most 1 + floor(log2 T) of them (step 1),
# the squared norm of the largest column.


def nodes_touched(steps: int) -> int:
    """Return the most nodes that one step's sum enters, 1 + floor(log2(steps)), for steps >= 1."""
    return validate.integer(steps=steps, minimum=1).bit_length()


@dataclass(frozen=True)
class Tree(base.Redrawn, base.Settings):
    """The naive binary tree: prefix t carries the noise of the nodes of t's binary expansion.

    Each step draws up to 1 + floor(log2 T) rows of Z, 2 on average, and stores none.

    Parameters
    ----------
    steps : int
        T; the scale is 1/sqrt(1 + floor(log2 T)).
    """

    steps: int
    kind: ClassVar[str] = "tree"

    @property
    def node_scale(self) -> float:
        """Standard deviation of a node's noise over that of Z: the largest column norm of the 0/1 matrix."""
        return math.sqrt(nodes_touched(self.steps))

    def rows(self, step: int) -> tuple[tuple[int, float], ...]:
        """Return row `step` (from 0) of C^{-1}: see above."""
        t = base.check_row(step, self.steps) + 1
        older = [(t - 2**i - 1, -self.node_scale) for i in range((t & -t).bit_length() - 1)]
        return (*reversed(older), (step, self.node_scale))

    def columns(self, indices: Indices, steps: int) -> Matrix:
        """Return columns of the leading block, (steps, len(indices))."""
        result = np.zeros((base.check_block(steps, self.steps), len(indices)))
        for place, index in enumerate(indices):
            t = int(index) + 1
            while t <= steps:
                result[t - 1, place] = 1.0 / self.node_scale
                t += t & -t
        return result

    def inverse_row_norms(self, steps: int) -> Matrix:
        """Return the squared row norms of C^{-1}, (steps,): (1 + k) (1 + floor(log2 T)) with 2^k the lowbit."""
        t = np.arange(1, base.check_block(steps, self.steps) + 1)
        # The exponent of a power of two in [1/2, 1) 2^e is one more than its logarithm.
        return np.frexp((t & -t).astype(np.float64))[1] * float(nodes_touched(self.steps))


@dataclass(frozen=True)
class TreeOptimal(base.Settings, Redrawn):
    """The binary tree with the best linear estimate of each prefix from its nodes ("full Honaker").

    With N the 0/1 matrix of every complete node [j 2^k, (j+1) 2^k) of 0 .. T - 1, C is the lower-triangular L with
    L^T L = N^T N (reverse Cholesky), scaled. Equal products of columns mean equal sensitivity under every
    participation. N = Q L with Q^T Q = I, so the best estimate A (N^T N)^{-1} N^T z of the prefixes is
    A L^{-1} (Q^T z): the noise of the strategy L, exactly; and L can be streamed, while the estimate itself would wait
    for later nodes.

    Dense: N_t takes all of Z_0 .. Z_t, drawn again, and the matrix and its inverse take 16 T^2 bytes.

    Parameters
    ----------
    steps : int
        T.
    """

    steps: int
    kind: ClassVar[str] = "tree-optimal"

    @cached_property
    def entries(self) -> Matrix:  # type: ignore[override]
        """C, (T, T)."""
        # J X J turns rows and columns around: with J N^T N J = R R^T, R lower-triangular, L = J R^T J.
        reverse = np.linalg.cholesky(_node_gram(self.steps)[::-1, ::-1])
        return Dense(np.tril(reverse.T[::-1, ::-1])).entries


def _node_gram(steps: int) -> Matrix:
    """Return N^T N, (steps, steps): the number of complete nodes that contain both steps."""
    result = np.zeros((steps, steps))
    for k in range(steps.bit_length()):
        size = 2**k
        for first in range(0, steps - size + 1, size):
            result[first : first + size, first : first + size] += 1.0
    return result


# Toeplitz strategies: C[t, s] = c_{t-s}, a power series c(x) = sum c_k x^k, and C^{-1} the series 1/c(x).
#
# The workload of plain SGD, all ones, is the series 1/(1-x). Its square root is a strategy in closed form:
#
#     (1-x)^{-1/2}:  f_0 = 1,  f_k = f_{k-1} (2k-1)/(2k);      (1-x)^{1/2}:  g_0 = 1,  g_k = g_{k-1} (2k-3)/(2k).


class Toeplitz(base.Settings):
    """Base of all Toeplitz strategies; each gives the first columns of C and C^{-1}."""

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
        """Return the weights -c_j and the normalizer c_0 (see `dpcore.stages.strategies.kinds`)."""
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

    Streams from a ring of the last b - 1 rows of Z; or ``in_blocks(strategy, 1)`` draws b rows again at each step and
    keeps nothing. C is not banded, so proofs for banded C (amplification under cyclic Poisson sampling) do not apply.

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
                "the zeros of the polynomial must be outside of the unit circle"
            )
        object.__setattr__(self, "series", tuple(base.scaled(values, 1.0 / norm).tolist()))

    def ratio(self) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Return 1 and p."""
        return (1.0,), self.series, 1.0

    def coefficients(self, step: int) -> RingCoefficients:
        """Return the weights p_j / p_0 and the normalizer 1 / p_0 of a ring of Z."""
        t, first = base.check_row(step, self.steps), self.series[0]
        return ring_of([value / first for value in self.series[1:]], t, 1 / first, "input")


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
    """Return the L2 norm, with the same bits on every machine: the name of a strategy depends on it."""
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
        return p, q, _length(p, q, self.steps)


@lru_cache(maxsize=32)
def _length(p: tuple[float, ...], q: tuple[float, ...], steps: int) -> float:
    """Return the norm of the first `steps` coefficients of P / Q; each step asks for it."""
    return float(np.linalg.norm(response(p, q, steps)))


@lru_cache(maxsize=32)
def polynomials(scales: tuple[float, ...], decays: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return P and Q, coefficients of x^0 .. x^m."""
    factors = [np.array([1.0, -decay]) for decay in decays]
    q = reduce(np.convolve, factors, np.ones(1))
    p = q.copy()
    for j, scale in enumerate(scales):
        p[1:] += scale * reduce(np.convolve, factors[:j] + factors[j + 1 :], np.ones(1))
    return tuple(p.tolist()), tuple(q.tolist())


# Strategies by name, also before the number of steps is known.


BANDED: Final = "banded-inverse-square-root"
NAMES: Final = ("identity", "tree", "tree-optimal", "square-root", BANDED)


@dataclass(frozen=True)
class NamedStrategy:
    """A name of `dpcore.strategies.NAMES`; `dpcore.Plan` makes the matrix for its number of steps.

    Parameters
    ----------
    name : str
        One of the names.
    bands : int, optional
        Of "banded-inverse-square-root"; a shorter run takes as many as it has steps.
    """

    name: str
    bands: int | None = None

    def __post_init__(self) -> None:
        validate.choice(NAMES, strategy=self.name)
        if self.name != BANDED and self.bands is not None:
            raise ArgumentError(f"bands={self.bands!r}: is only for strategy={BANDED!r}")
        if self.name == BANDED and self.bands is None:
            raise ArgumentError(
                f"bands=None: strategy={BANDED!r} needs a number of bands, such as bands=4; to a method give "
                f"dpcore.strategies.NamedStrategy({BANDED!r}, bands=4)"
            )
        if self.bands is not None:
            object.__setattr__(self, "bands", validate.integer(1, bands=self.bands))

    def of(self, steps: int) -> Strategy:
        """Return the strategy for a run of `steps` steps."""
        return strategy(self.name, steps, bands=None if self.bands is None else min(self.bands, max(steps, 1)))

    def describe(self) -> dict[str, Any]:
        """Return name and bands."""
        return {"kind": self.name, **({} if self.bands is None else {"bands": self.bands})}


def strategy(name_or_object: str | npt.ArrayLike | Strategy, steps: int, *, bands: int | None = None) -> Strategy:
    """Return a strategy for a run of `steps` steps.

    Parameters
    ----------
    name_or_object : str, (T, T) array or Strategy
        One of `NAMES`; a lower-triangular matrix with T >= steps, whose rows are all kept; or a strategy, returned
        unchanged.
    steps : int
        Steps of the run, 1 or more.
    bands : int, optional
        Bands of "banded-inverse-square-root", and of nothing else.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the name is unknown, `bands` is missing or out of place, or the strategy does not suit (`check_steps`).
    """
    steps = validate.integer(steps=steps, minimum=1)
    if isinstance(name_or_object, str):
        named = NamedStrategy(name_or_object, bands)
        check_rows(named.name, steps, dense=named.name == TreeOptimal.kind)
        kinds: dict[str, Any] = {"tree": Tree, "tree-optimal": TreeOptimal, "square-root": SquareRoot}
        if named.bands is not None:
            chosen: Any = banded_inverse_square_root(named.bands, steps)
        else:
            chosen = Identity() if named.name == "identity" else kinds[named.name](steps)
    elif bands is not None:
        raise ArgumentError(f"bands={bands!r}: is only for strategy={BANDED!r}")
    else:
        chosen = _given(name_or_object)
    check_steps(chosen, steps)
    return cast("Strategy", chosen)


def _given(value: Any) -> Any:
    parts = ("of", "order", "steps", "coefficients", "rows", "matrix", "columns", "inverse_row_norms", "describe")
    if all(hasattr(value, part) for part in parts):
        return value
    if isinstance(value, (np.ndarray, list, tuple)):
        return from_matrix(value)
    raise ArgumentTypeError(
        f"strategy={value!r}: must be a name, one of {', '.join(map(repr, NAMES))}, a (T, T) array or a strategy"
    )
