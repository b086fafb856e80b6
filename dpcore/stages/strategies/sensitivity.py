"""The sensitivity of a matrix mechanism: how far one example moves C times the sums.

Two neighboring data sets differ, under zero-out, in one example, which takes part at the steps p of one pattern. With
x_i the change that it makes to the sum of step i, ||x_i|| <= 1 in clip norms, x_i = 0 outside of p, and G = C^T C,

    ||C x||_F^2 = sum_{i,j in p} G_ij <x_i, x_j>  <=  sum_{i,j in p} |G_ij|,        since |<x_i, x_j>| <= 1.

If no G_ij of the pattern is negative, x_i = u for one unit vector u reaches it: the value is then exactly
||sum_{i in p} C[:, i]||. If some are negative it is a bound, valid for vectors of any dimension. Either way it does
not fall when steps are added to p, so an example that misses some of its steps is covered, and so is a pattern within
another.

A branch that left the run at step `first` adds only the rows [first, steps), with its fresh noise. There the change is
C[first:steps] x, and the same holds with G = C[first:steps]^T C[first:steps].

The x_i may depend on what was released before step i: with Gaussian noise and a lower-triangular C, the adaptive
mechanism is as private as the one with all x_i fixed. **The pattern may not**: it is fixed before the run.

Blocks. With reshuffled epochs the steps of an example are j_1, j_2, ..., one from each epoch, and any choice may occur.
Then

    ||C x||^2  <=  sum_{e,f} |G[j_e, j_f]|  <=  sum_e max_{j in e} G_jj  +  2 sum_{e<f} max_{i in e, j in f} |G_ij|.

The first bound is exact for the worst choice if no entry of G is negative; the second takes each maximum by itself,
so it is a proven upper bound for **every** choice, and for those that leave out a block. The (k, b) value of a fixed
order is not: the last step of one epoch may be next to the first of the next, and such a pair has a larger G.

References
----------
Choquette-Choo, McMahan, Rush, Thakurta, "Multi-Epoch Matrix Factorization Mechanisms for Private Machine Learning",
2023, section 3.
Denisov, McMahan, Rush, Smith, Thakurta, "Improved Differential Privacy for SGD via Optimal Private Linear Operators on
Adaptive Streams", 2022, Theorem 2.1.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.stages.strategies.base import Indices, Matrix, Strategy, check_block
from dpcore.stages.strategies.kinds import Banded, BandedToeplitz, Identity, Toeplitz

_CHUNK = 256


def sensitivity(strategy: Strategy, patterns: Iterable[npt.ArrayLike], steps: int, first: int = 0) -> float:
    """Return the largest L2 norm by which one example moves C times the sums, in units of the clip norm.

    Parameters
    ----------
    strategy : Strategy
        C, with at least `steps` rows.
    patterns : iterable of (k,) integer arrays
        For every example the steps, each in [0, steps), at which it takes part; equal ones need to be given only once,
        in any order. Fixed before the run.
    steps : int
        Steps of the run; each row of C is released.
    first : int
        Rows before it do not count: they are shared with another branch, which pays for them.

    Returns
    -------
    float
        The exact value if C^T C has no negative entry within the patterns, else an upper bound (see the module); 0
        without patterns.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a step is outside of the run, occurs twice in a pattern, or is not an integer.
    """
    steps = check_block(validate.integer(steps=steps, minimum=0), strategy.steps)
    checked: Iterable[Indices] = (_pattern(p, steps) for p in patterns)
    column = plain_column(strategy, steps)
    square = _squared(strategy, steps, first) if column is None else _shifted_squared(column, steps, first)
    if first == 0 and column is not None:
        checked = _earliest(checked)
    return math.sqrt(max(map(square, checked), default=0.0))


def plain_column(strategy: Strategy, steps: int) -> Matrix | None:
    """Return the first column of a Toeplitz matrix without negative entries, up to its last one; else None."""
    column = strategy.first_column(steps) if isinstance(strategy, Toeplitz) else np.empty(0)
    return column[: np.flatnonzero(column)[-1] + 1] if column.size and column.min() >= 0 else None


def _earliest(patterns: Iterable[Indices]) -> Iterator[Indices]:
    """Yield the earliest of patterns that are shifts of one another.

    The columns of a Toeplitz matrix are one column, shifted and cut off. The sum over the earliest pattern has all rows
    of the sum over a later one, and then some. If no entry is negative, its norm is what is asked for, and the largest.
    """
    kept: dict[bytes, Indices] = {}
    for pattern in patterns:
        if pattern.size:
            shape = (pattern - pattern[0]).tobytes()
            if shape not in kept or pattern[0] < kept[shape][0]:
                kept[shape] = pattern
    yield from kept.values()


def block_sensitivity(strategy: Strategy, blocks: Sequence[Indices], steps: int, first: int = 0) -> float:
    """Return an upper bound on how far one example moves C times the sums, in units of the clip norm.

    `blocks` are the steps 0 .. steps - 1, cut into parts of one length, but for a shorter last one: an example takes
    part in at most one of each. Rows before `first` do not count, as in `sensitivity`.

    Takes about steps^3 / 3 multiplications (a second at 2000 steps), and memory for two blocks of columns; of a
    Toeplitz matrix without negative entries, and with all rows, bands x steps, and no matrix.
    """
    steps = check_block(steps, strategy.steps)
    if isinstance(strategy, Identity):
        return math.sqrt(sum(int(block[-1]) >= first for block in blocks))
    if first == 0 and (column := plain_column(strategy, steps)) is not None:
        return math.sqrt(_shifted_blocks(column, len(blocks[0]), steps))
    total = 0.0
    for e, earlier in enumerate(blocks):
        columns = strategy.columns(earlier, steps)[first:]
        total += float((columns**2).sum(axis=0).max())
        for later in blocks[e + 1 :]:
            top = max(int(later[0]), first)  # columns of later steps are 0 above it
            products = columns[top - first :].T @ strategy.columns(later, steps)[top:]
            total += 2.0 * float(np.abs(products).max())
    return math.sqrt(total)


def _shifted_blocks(column: Matrix, period: int, steps: int) -> float:
    """Return the bound for blocks of `period` steps, squared, from the first column of a Toeplitz matrix.

    ``G[j - l, j] = sum of c_m c_{m+l} over m < steps - j`` falls as j grows. So of two blocks, and of one lag l, the
    earliest pair is the largest: one of its steps is the first of its block.
    """
    starts, total = np.arange(0, steps, period), 0.0
    for apart in range(len(starts)):  # blocks
        largest = np.zeros(len(starts) - apart)
        lags = range(period * (apart - 1) + 1, min(period * (apart + 1), len(column))) if apart else (0,)
        for lag in lags:
            sums = np.cumsum(column[: len(column) - lag] * column[lag:])
            later = starts[apart:] if lag <= period * apart else starts[: len(largest)] + lag
            later = later[later < steps]
            found = sums[np.minimum(steps - later, len(sums)) - 1]
            largest[: len(found)] = np.maximum(largest[: len(found)], found)
        total += (2.0 if apart else 1.0) * float(largest.sum())
    return total


def bands(strategy: Strategy, steps: int) -> int:
    """Return the number of bands of the leading block of C, (steps, steps), including the diagonal; 0 for no steps.

    ``C[t, s] = 0`` wherever t - s >= bands, exactly. It is counted on the columns if the kind of strategy does not
    imply it. A banded *inverse* does not make C banded.
    """
    steps = check_block(steps, strategy.steps)
    if isinstance(strategy, Identity | Banded | BandedToeplitz):
        return min(strategy.order + 1, steps)
    if isinstance(strategy, Toeplitz):
        return int(np.flatnonzero(strategy.first_column(steps)).max(initial=-1)) + 1
    most = 0
    for places, block in _blocks(strategy, steps):
        rows, columns = np.nonzero(block)
        most = max(most, int((rows - places[columns]).max()) + 1)
    return most


def largest_column_norm(strategy: Strategy, steps: int) -> float:
    """Return the largest L2 norm of a column of the leading block of C; 0 of no steps."""
    steps = check_block(steps, strategy.steps)
    if isinstance(strategy, Identity):
        return float(steps > 0)
    if isinstance(strategy, Toeplitz):
        return float(np.linalg.norm(strategy.first_column(steps)))
    if isinstance(strategy, Banded):
        return float(np.linalg.norm(_bands(strategy, steps, 0), axis=0).max(initial=0.0))
    blocks = _blocks(strategy, steps)
    return max((float(np.linalg.norm(block, axis=0).max()) for _, block in blocks), default=0.0)


def _blocks(strategy: Strategy, steps: int) -> Iterator[tuple[Indices, Matrix]]:
    """Yield the columns, some at a time, with their indices."""
    for first in range(0, steps, _CHUNK):
        places = np.arange(first, min(first + _CHUNK, steps))
        yield places, strategy.columns(places, steps)


def _pattern(pattern: npt.ArrayLike, steps: int) -> Indices:
    array = np.asarray(pattern)
    if array.ndim != 1:
        raise ArgumentError(f"patterns: must be one-dimensional arrays of steps, not one of shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise ArgumentTypeError(f"patterns: must be integer steps, not {array.dtype}")
    result = np.sort(array.astype(np.int64))
    if result.size and (result[0] < 0 or result[-1] >= steps):
        bad = result[0] if result[0] < 0 else result[-1]
        raise ArgumentError(f"patterns: the step {bad} is outside of the run, steps 0 to {steps - 1}")
    if np.any(result[1:] == result[:-1]):
        twice = result[1:][result[1:] == result[:-1]][0]
        raise ArgumentError(f"patterns: the step {twice} occurs twice in one pattern; an example counts once in a step")
    return result


def _shifted_squared(column: Matrix, steps: int, first_row: int) -> Callable[[Indices], float]:
    """As `_squared`, for a Toeplitz matrix without negative entries: the squared norm of the summed columns."""

    def squared(pattern: Indices) -> float:
        total = np.zeros(steps)
        for step in pattern.tolist():
            rows = total[step : step + len(column)]
            rows += column[: len(rows)]
        return float(total[first_row:] @ total[first_row:])

    return squared


def _squared(strategy: Strategy, steps: int, first_row: int) -> Callable[[Indices], float]:
    """Return pattern -> sum of |C^T C| over the pattern, C without the rows before `first_row`."""
    if isinstance(strategy, Banded | BandedToeplitz) and strategy.order < _CHUNK:
        return _banded_squared(_bands(strategy, steps, first_row))

    def squared(pattern: Indices) -> float:
        total, plain = np.zeros(steps), True
        for first in range(0, pattern.size, _CHUNK):
            block = strategy.columns(pattern[first : first + _CHUNK], steps)[first_row:]
            total[first_row:] += block.sum(axis=1)
            plain = plain and bool((block >= 0).all())
        if plain:  # then C^T C has no negative entry, and its sum is the squared norm of the summed columns
            return float(total @ total)
        block = strategy.columns(pattern, steps)[first_row:]
        return float(np.abs(block.T @ block).sum())

    return squared


def _bands(strategy: Banded | BandedToeplitz, steps: int, first_row: int) -> Matrix:
    """Return the bands of the leading block, (b, steps): `Banded.bands` without rows beyond it or before the first."""
    if isinstance(strategy, Banded):
        bands = strategy.bands[:steps, :steps].copy()
    else:
        bands = np.repeat(np.array(strategy.series[:steps])[:, None], steps, axis=1)
    rows = np.add.outer(np.arange(len(bands)), np.arange(steps))
    bands[(rows >= steps) | (rows < first_row)] = 0.0
    return bands


def _banded_squared(bands: Matrix) -> Callable[[Indices], float]:
    """As `_squared`, from |G[t + l, t]| = |sum_m C[t+l+m, t+l] C[t+l+m, t]| for l < b, zero for the others."""
    count, steps = bands.shape
    gram = np.zeros((count, steps))
    for lag in range(count):
        size = steps - lag
        gram[lag, :size] = np.abs(np.einsum("kt,kt->t", bands[: count - lag, lag:], bands[lag:, :size]))

    def squared(pattern: Indices) -> float:
        total = float(gram[0, pattern].sum()) if pattern.size else 0.0
        # Steps of a pattern differ: those `apart` places apart are at least as many rows apart.
        for apart in range(1, min(count, pattern.size)):
            lag = pattern[apart:] - pattern[:-apart]
            near = lag < count
            if not near.any():
                break
            total += 2.0 * float(gram[lag[near], pattern[:-apart][near]].sum())
        return total

    return squared
