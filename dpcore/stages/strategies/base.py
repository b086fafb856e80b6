"""The protocol of a strategy: the matrix C of a correlated-noise mechanism, and the stream of its noise.

The noise of step t is row t of C^{-1} Z, with Z rows of independent Gaussian noise. C is square, lower-triangular, with
a positive diagonal, and scaled so that its largest column norm is 1: an example that takes part once then moves C times
the sums by at most one clip norm, whatever the strategy, and the identity is DP-SGD with its usual noise multiplier.
"""

import hashlib
import math
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.spec.free_memory import check_room, host_memory
from dpcore.spec.ops import Correlation, FilterCoefficients
from dpcore.spec.recurrence import correlated

Matrix = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

# C times the noise as it was really added is Z plus C times its rounding: in float32, 2^-24 of the noise. At this
# growth of the noise over Z that is 6e-5 of a standard deviation of Z; far beyond, the noise is no longer Gaussian.
LARGEST_GROWTH = 1e3

# Memory for each row of a run that is needed before it begins: variances, their roots, coefficients, one to spare.
_BYTES_OF_A_ROW = 32

_STREAMING_TOLERANCE = 1e-6
_SCALED = 1e-13


class Strategy(Protocol):
    """A lower-triangular matrix C that correlates the noise: N = C^{-1} Z, one row a step."""

    @property
    def order(self) -> int:
        """Vectors that streaming keeps from step to step, each of the parameters' size."""

    def of(self, steps: int) -> "Strategy":
        """Return the strategy of a run of `steps` steps: itself, unless its settings wait for that number."""

    @property
    def steps(self) -> int | None:
        """Its number of rows; None means any number."""

    def coefficients(self, step: int) -> Correlation | None:
        """Return the recurrence, with ``b[0] = 1``, or the ring that makes N_step of Z_step and `order` vectors.

        See `dpcore.spec.ops.Backend.correlate`. None says that rows of Z are drawn again: see `rows`. Lengths do not
        change from step to step.
        """

    def rows(self, step: int) -> tuple[tuple[int, float], ...]:
        """Return row `step` of C^{-1} as (row of Z, weight) pairs, none beyond `step`, zeros left out."""

    def matrix(self, steps: int) -> Matrix:
        """Return the leading block of C, (steps, steps) float64."""

    def columns(self, indices: Indices, steps: int) -> Matrix:
        """Return the columns `indices` of `matrix(steps)`, (steps, len(indices)), without making all of it."""

    def inverse_row_norms(self, steps: int) -> Matrix:
        """Return the **squared** norm of each row of C^{-1}: (steps,), the variance of N_t over that of Z."""

    def describe(self) -> dict[str, Any]:
        """Return its kind and settings as JSON values, with the SHA-256 of the matrix if it was given one."""


class Whole:
    """A strategy that waits for nothing."""

    def of(self, steps: int) -> Self:
        """Return itself."""
        return self

    def columns(self, indices: Indices, steps: int) -> Matrix:
        """Return the columns `indices` of the leading block, (steps, len(indices))."""
        raise NotImplementedError

    def matrix(self, steps: int) -> Matrix:
        """Return the leading block of C, (steps, steps) float64."""
        return self.columns(np.arange(steps), steps)


class Redrawn(Whole):
    """A strategy without a recurrence: rows of Z are drawn again."""

    order: ClassVar[int] = 0

    def coefficients(self, step: int) -> None:
        """Return None: rows are drawn again."""


class Settings(validate.Checked, Whole):
    """A strategy that is made of a few settings, its dataclass fields."""

    kind: ClassVar[str]
    rules: ClassVar[validate.Rules] = {"steps": partial(validate.integer, 1)}

    def describe(self) -> dict[str, Any]:
        """Return the kind and the settings."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def check_steps(strategy: Strategy, steps: int) -> int:
    """Return `steps` if a run of that length can use the strategy.

    Raises
    ------
    ArgumentError
        If the strategy has fewer rows, or its noise grows beyond `LARGEST_GROWTH` times the seed noise.
    """
    steps = validate.integer(steps=steps, minimum=0)
    kind = strategy.describe()["kind"]
    if strategy.steps is not None and steps > strategy.steps:
        raise ArgumentError(
            f"steps={steps}: the strategy ({kind}) has {strategy.steps} rows; "
            f"take at most {strategy.steps} steps or a strategy of {steps} rows"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        growth = np.sqrt(strategy.inverse_row_norms(steps))
    usable = growth <= LARGEST_GROWTH  # False for NaN
    if not usable.all():
        first = int(np.argmin(usable))
        fewer = f"at most {first} steps or " if first else ""
        raise ArgumentError(
            f"steps={steps}: the strategy {kind!r} is so close to singular that its noise at step {first} is "
            f"{growth[first]:.3g} times the seed noise; take {fewer}a better conditioned strategy"
        )
    return steps


def check_rows(kind: str, steps: int, dense: bool = False) -> None:
    """Refuse more steps than can be looked at before the run; with `dense`, than a whole matrix can be made of.

    Raises
    ------
    ArgumentError
        Before anything is allocated.
    """
    free, where = host_memory()
    needed = _BYTES_OF_A_ROW * (steps * steps if dense else steps)
    most = math.isqrt((free or 0) // _BYTES_OF_A_ROW) if dense else (free or 0) // _BYTES_OF_A_ROW
    what = f"steps={steps:,}: planning correlated noise ({kind}) looks at every {'entry of C' if dense else 'row'}"
    check_room(needed, what, f"take at most {most:,} steps, or independent noise (no strategy)", free, where)


def check_streaming(strategy: Strategy, steps: int) -> None:
    """Refuse a strategy whose noise is not that of its matrix: one the caller wrote may contradict itself.

    The event is made of `matrix` and `columns`, the noise of `rows` or `coefficients`, and its grid of
    `inverse_row_norms`. Compared are the first 32 steps, and of a strategy of the caller's the first 512, within 1e-6
    of the largest entry.

    Raises
    ------
    ArgumentError
        If the noise that the strategy streams does not satisfy ``C N = Z``.
    """
    kind = strategy.describe()["kind"]
    own = type(getattr(strategy, "strategy", strategy)).__module__.startswith("dpcore.")  # also of one `in_blocks`
    count = min(steps, 32 if own else 512)
    matrix = np.asarray(strategy.matrix(count), dtype=np.float64)
    unit, drawn, streamed = np.eye(count), np.zeros((count, count)), np.zeros((count, count))
    state = [np.zeros(count) for _ in range(max(strategy.order, count))]
    for step in range(count):
        for row, weight in strategy.rows(step):
            if not 0 <= row <= step:
                raise ArgumentError(f"strategy={kind!r}: rows({step}) has row {row}; must be one of 0 to {step}")
            drawn[step, row] += weight
        coefficients = strategy.coefficients(step)
        if isinstance(coefficients, FilterCoefficients) and coefficients.b[0] != 1:
            raise ArgumentError(
                f"strategy={kind!r}: coefficients({step}) has b[0]={coefficients.b[0]!r}, and must have "
                "1: divide b and the normalizer by it, which gives the same noise"
            )
        streamed[step] = drawn[step] if coefficients is None else correlated(unit[step], state, coefficients)
    for noise in (drawn, streamed):
        error = np.abs(matrix @ noise - unit).max()
        if not error <= _STREAMING_TOLERANCE * max(1.0, np.abs(noise).max()):
            raise ArgumentError(
                f"strategy={kind!r}: its noise is not C^{{-1}} Z for its own matrix C (off by "
                f"{error:.3g} in the first {count} steps); rows(), coefficients() and matrix() must describe one matrix"
            )
    norm = float(np.linalg.norm(matrix, axis=0).max())
    if norm > 1 + _STREAMING_TOLERANCE:  # the grid's derivation needs 1
        raise ArgumentError(
            f"strategy={kind!r}: matrix() has a column of norm {norm:.6g}; divide the matrix by its largest norm: that "
            "does not change the mechanism"
        )
    if not np.allclose(strategy.columns(np.arange(count), count), matrix, atol=_STREAMING_TOLERANCE):
        raise ArgumentError(f"strategy={kind!r}: columns() must be columns of matrix()")
    if not np.allclose(strategy.inverse_row_norms(count), np.square(drawn).sum(axis=1), rtol=_STREAMING_TOLERANCE):
        raise ArgumentError(f"strategy={kind!r}: inverse_row_norms() must be the squared norms of what rows() returns")


def identify(strategy: Strategy) -> str:
    """Return one line that names the strategy in an event: its kind with its settings."""
    described = strategy.describe()
    # A list is a tuple that was written as JSON.
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in described.items()}
    settings = ", ".join(f"{name}={value}" for name, value in values.items() if name != "kind")
    return f"{described['kind']}({settings})"


def check_row(step: int, rows: int | None) -> int:
    """Return `step` if it is one of the rows; `rows=None` means any number."""
    step = validate.integer(step=step, minimum=0)
    if rows is not None and step >= rows:
        raise ArgumentError(f"step={step}: the strategy has {rows} rows; the last step is {rows - 1}")
    return step


def check_block(steps: int, rows: int | None) -> int:
    """Return `steps` if there are that many rows."""
    steps = validate.integer(steps=steps, minimum=0)
    if rows is not None and steps > rows:
        raise ArgumentError(f"steps={steps}: must be at most {rows}, the rows of the strategy")
    return steps


def finite_array(dimensions: int, **values: Any) -> Matrix:
    """Return the value as a new float64 array of that many dimensions, not empty, all finite."""
    ((name, value),) = values.items()
    try:
        array = np.array(value, dtype=np.float64, order="C")
    except (TypeError, ValueError) as cause:
        raise ArgumentTypeError(f"{name}: must be a {dimensions}-dimensional array of real numbers") from cause
    if array.ndim != dimensions or array.size == 0:
        raise ArgumentError(f"{name}.shape={array.shape}: must be {dimensions}-dimensional, with at least one entry")
    if not np.isfinite(array).all():
        place = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise ArgumentError(f"{name}: the entry {array[place]} at {place} must be finite")
    return array


def check_diagonal(diagonal: Matrix, name: str) -> None:
    """Refuse a diagonal that is not positive: C must be invertible, and -C is the same mechanism as C."""
    if not (diagonal > 0).all():
        place = int(np.argmin(diagonal > 0))
        value = diagonal[place]
        hint = "the matrix is singular; use the identity for independent noise"
        if value:
            hint = "multiply that row by -1, which does not change the mechanism"
        raise ArgumentError(f"{name}: the diagonal entry {value:.6g} at row {place} must be greater than 0: {hint}")


def lower_triangular(**values: Any) -> Matrix:
    """Return the value as a new float64 matrix that is square, lower-triangular and has a positive diagonal."""
    ((name, _),) = values.items()
    matrix = finite_array(2, **values)
    if matrix.shape[0] != matrix.shape[1]:
        side = min(matrix.shape)
        raise ArgumentError(
            f"{name}.shape={matrix.shape}: must be square, one row and one column for each step, such as {(side, side)}"
        )
    above = np.argwhere(np.triu(matrix, 1))
    if above.size:
        row, column = (int(i) for i in above[0])
        raise ArgumentError(
            f"{name}: the entry {matrix[row, column]:.6g} at row {row}, column {column} is above the diagonal: the "
            "noise would depend on later steps; give a lower-triangular matrix with the same C^T C (reverse Cholesky)"
        )
    check_diagonal(np.diagonal(matrix), name)
    return matrix


def scaled(values: Matrix, norm: float) -> Matrix:
    """Return `values` over their largest column norm, read-only; unchanged if that is 1 up to rounding.

    So a strategy built again from its own values has the same bits. The scale need not be exact: the
    sensitivity is computed from the values that run.
    """
    if not 0.0 < norm < np.inf:
        raise ArgumentError(
            f"strategy: its largest column norm {norm:.3g} is out of range; multiply the matrix by a constant, which "
            "does not change the mechanism"
        )
    result = values if abs(norm - 1.0) < _SCALED else values / norm
    result.flags.writeable = False
    return result


def digest(array: Matrix) -> str:
    """Return the SHA-256 of the shape and the float64 entries, row by row, little-endian."""
    header = ",".join(map(str, array.shape)).encode()
    return hashlib.sha256(header + b":" + np.ascontiguousarray(array, dtype="<f8").tobytes()).hexdigest()
