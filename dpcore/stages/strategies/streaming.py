"""How the noise of a strategy is made step by step, and the cost of that."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.spec.ops import RingCoefficients
from dpcore.stages.strategies.base import Matrix, Strategy, check_steps
from dpcore.stages.strategies.kinds import Identity, NamedStrategy, Toeplitz

# Noise made of rows of Z that are drawn again, for a block of steps together.
#
# N_t = sum_r W[t,r] Z_r with W = C^{-1}. A block of B steps s .. s + B - 1 keeps one sum for each of its steps. At step
# s every row Z_0 .. Z_s is drawn, once, and added to all sums, each with its own weight; at a later step t of the block
# Z_t is drawn and added to the sums of t and after. Each sum takes its rows in ascending order, as it does with B = 1:
# the same additions of the same numbers, and so the same bits, whatever B is, and wherever a run was stopped. A dense
# strategy draws about T^2 / (2 B) + T rows in T steps instead of T^2 / 2.


class Addition(NamedTuple):
    """A row of Z, drawn once, and the sums that it is added to: (place of the sum, weight) pairs."""

    row: int
    weights: tuple[tuple[int, float], ...]


def _of_strategy(name: str, words: str) -> Any:
    return property(attrgetter(f"strategy.{name}"), doc=words)


@dataclass(frozen=True)
class InBlocks:
    """A strategy that draws rows of Z again, for `block` steps together; its matrix is that of `strategy`.

    Parameters
    ----------
    strategy : Strategy or NamedStrategy
        Any kind except independent noise and banded C, which draw each row once anyway.
    block : int
        B steps, and B vectors of the parameters' size. 1 keeps nothing and draws all rows again at each step.
    """

    strategy: Any
    block: int
    _kept: dict[int, Matrix] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", validate.integer(1, block=self.block))
        if isinstance(self.strategy, InBlocks):
            object.__setattr__(self, "strategy", self.strategy.strategy)
        if isinstance(self.strategy, NamedStrategy):
            return
        if not all(hasattr(self.strategy, part) for part in ("coefficients", "rows", "describe")):
            raise ArgumentTypeError(f"strategy={self.strategy!r}: must be a strategy, or a NamedStrategy")
        coefficients = self.strategy.coefficients(0)
        ring_of_noise = isinstance(coefficients, RingCoefficients) and coefficients.keeps == "output"
        if isinstance(self.strategy, Identity) or ring_of_noise:
            raise ArgumentError(
                f"strategy={self.describe()['kind']!r}: must be one that draws rows again; the noise of this one draws "
                "each row once, and streams by itself"
            )

    def of(self, steps: int) -> "InBlocks":
        """Return the strategy of a run of `steps` steps: itself, unless its settings wait for that number."""
        whole = self.strategy.of(steps)
        return self if whole is self.strategy else InBlocks(whole, self.block)

    @property
    def order(self) -> int:
        """The number of sums of a block; 0 if a block is one step."""
        return 0 if self.block == 1 else min(self.block, self.steps or self.block)

    @property
    def steps(self) -> int | None:
        """Its number of rows; None means any number."""
        rows: int | None = self.strategy.steps
        return rows

    def coefficients(self, step: int) -> None:
        """Return None: rows are drawn again."""

    rows = _of_strategy("rows", "Those of the strategy, as its matrix is.")
    matrix = _of_strategy("matrix", "That of the strategy.")
    columns = _of_strategy("columns", "Those of the strategy.")
    inverse_row_norms = _of_strategy("inverse_row_norms", "Those of the strategy.")
    describe = _of_strategy("describe", "The matrix, not how it is streamed.")

    def first(self, step: int) -> int:
        """Return the first step of the block of `step`."""
        return step - step % self.block

    def additions(self, step: int) -> Iterator[Addition]:
        """Yield the additions of `step` to the sums of its block, rows ascending; a first step begins with zeros.

        The noise of the step is then the sum at its place, ``step - first(step)``.
        """
        first = self.first(step)
        weights = self.weights(first)
        for row in range(step + 1) if step == first else (step,):
            places = np.flatnonzero(weights[:, row])
            if places.size:
                yield Addition(row, tuple(zip(places.tolist(), weights[places, row].tolist(), strict=True)))

    def weights(self, first: int) -> Matrix:
        """Return the rows of C^{-1} of the block that begins at `first`: (steps of the block, rows up to its end)."""
        kept = self._kept.get(first)
        if kept is not None:
            return kept
        stop = min(first + self.block, self.steps or first + self.block)
        matrix = np.zeros((stop - first, stop))
        for place in range(stop - first):
            for row, weight in self.rows(first + place):
                matrix[place, row] += weight
        self._kept.clear()
        self._kept[first] = matrix
        return matrix


def in_blocks(strategy: Strategy | NamedStrategy, block: int) -> Strategy:
    """Return the same matrix, its noise made for `block` steps together; the same bits whatever `block` is.

    Parameters
    ----------
    strategy : Strategy or NamedStrategy
        One that draws rows of Z again, such as `Dense` or `SquareRoot`, or `BandedInverseToeplitz`, which then keeps no
        ring: with ``block=1`` it draws its b rows at each step and stores nothing.
    block : int
        B steps, and B vectors of the parameters' size, as secret as the noise. 1 keeps none.

    Raises
    ------
    ArgumentError
        For independent noise and banded C, which draw each row once anyway.
    """
    return InBlocks(strategy, block)


WAYS: Final = ("ring", "recurrence", "redrawn", "blocks")
"""See `StreamingCost`."""

_FLOAT = 8  # bytes of a float64 number


@dataclass(frozen=True)
class StreamingCost:
    """The cost of a strategy's noise; each vector has the parameters' size.

    Attributes
    ----------
    how : str
        "ring": a ring of the last vectors, all read and one written at each step. "recurrence": state vectors that are
        all read and written. "redrawn": rows of Z drawn again at each step. "blocks": rows drawn again for several
        steps together.
    vectors : int
        Kept from step to step, as secret as the noise key.
    rows_drawn : float
        Rows of Z drawn in a step, on average over the run: passes of the generator over all parameters.
    bytes_moved : float
        Bytes of the kept vectors, float64, that a step reads and writes for each coordinate, on average; and where
        rows are drawn again, of the sum that each is added to.
    """

    how: str
    vectors: int
    rows_drawn: float
    bytes_moved: float

    @property
    def words(self) -> str:
        """The cost in one line."""
        kept = {
            "ring": f"a ring of {_count(self.vectors, 'vector')}",
            "recurrence": f"a recurrence with {_count(self.vectors, 'vector')}",
            "redrawn": "rows drawn again, no vectors",
            "blocks": f"blocks of {_count(self.vectors, 'sum')}",
        }[self.how]
        if self.how != "redrawn" and self.vectors == 0:
            kept = "nothing kept"
        rows = f"{self.rows_drawn:,.1f}".removesuffix(".0")
        return f"{kept}; {rows} row{'' if rows == '1' else 's'} of noise and {self.bytes_moved:,.0f} bytes a step"


def way(strategy: Strategy) -> str:
    """Return how a strategy streams, one of `WAYS`."""
    coefficients = strategy.coefficients(0)
    if coefficients is not None:
        return "ring" if isinstance(coefficients, RingCoefficients) else "recurrence"
    return "blocks" if strategy.order else "redrawn"


def streaming_cost(strategy: Strategy, steps: int) -> StreamingCost:
    """Return the cost of the noise of a run of `steps` steps.

    Parameters
    ----------
    strategy : Strategy
    steps : int
        Steps of the run, 1 or more.

    Raises
    ------
    ArgumentError
        If the strategy does not suit this number of steps (`check_steps`).
    """
    steps = check_steps(strategy, validate.integer(1, steps=steps))
    how, vectors = way(strategy), strategy.order
    if how in ("ring", "recurrence"):
        moved = 2 * vectors if how == "recurrence" else vectors + min(vectors, 1)
        return StreamingCost(how, vectors, 1.0, float(_FLOAT * moved))
    if isinstance(strategy, InBlocks) and vectors:
        rows, additions = _of_blocks(strategy, steps)
        # A sum is cleared once, and read and written at each addition; the noise of a step is read once.
        moved = 2 * additions + 2 * steps
    else:
        rows = _of_rows(strategy, steps)
        moved = 2 * rows
    return StreamingCost(how, vectors, rows / steps, _FLOAT * moved / steps)


def _of_rows(strategy: Strategy, steps: int) -> int:
    """Return the rows that all steps draw, each its own."""
    inner = strategy.strategy if isinstance(strategy, InBlocks) else strategy
    if isinstance(inner, Toeplitz):
        return int(np.cumsum(inner.inverse_first_column(steps) != 0).sum())
    return sum(len(inner.rows(step)) for step in range(steps))


def _of_blocks(strategy: InBlocks, steps: int) -> tuple[int, int]:
    """Return the rows that all steps draw, and how often a row is added to a sum."""
    rows, additions = 0, 0
    for first in range(0, steps, strategy.block):
        stop = min(first + strategy.block, steps)
        used = strategy.weights(first) != 0
        rows += int(used[:, : first + 1].any(axis=0).sum()) + stop - first - 1
        additions += int(used[:, : first + 1].sum() + used[:, first + 1 : stop].sum())
    return rows, additions


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
