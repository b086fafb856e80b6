"""How the noise of a strategy is made step by step, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from dpcore.spec import validate
from dpcore.spec.ops import RingCoefficients
from dpcore.stages.strategies.base import Strategy, check_steps
from dpcore.stages.strategies.in_blocks import InBlocks
from dpcore.stages.strategies.toeplitz import Toeplitz

WAYS: Final = ("ring", "recurrence", "redrawn", "blocks")
"""See `StreamingCost`."""

_FLOAT = 8  # bytes of a float64 number


@dataclass(frozen=True)
class StreamingCost:
    """What a strategy's noise costs.

    Attributes
    ----------
    how : str
        "ring": a ring of the last vectors, all read and one written at each step. "recurrence": state vectors that are
        all read and written. "redrawn": rows of Z drawn again at each step. "blocks": rows drawn again for several
        steps together.
    vectors : int
        Vectors kept from step to step, each of the parameters' size, as secret as the noise key.
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
    """Return what the noise of a run of `steps` steps costs.

    Parameters
    ----------
    strategy : Strategy
    steps : int
        Of the run, 1 or more.

    Raises
    ------
    ArgumentError
        If the strategy does not suit so many steps (`check_steps`).
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


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
