"""The bands of C: the depth of its columns, on which amplification by cyclic sampling rests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpcore.stages.strategies.banded import Banded, Identity
from dpcore.stages.strategies.base import Indices, Matrix, Strategy, check_block
from dpcore.stages.strategies.toeplitz import BandedToeplitz

_CHUNK = 256


def bands(strategy: Strategy, steps: int) -> int:
    """Return the number of bands of the leading block of C, (steps, steps), the diagonal among them; 0 of no steps.

    ``C[t, s] = 0`` wherever t - s >= bands, exactly. Counted on the columns themselves where the kind of strategy does
    not say it. A banded *inverse* does not make C banded.
    """
    steps = check_block(steps, strategy.steps)
    if isinstance(strategy, Identity | Banded | BandedToeplitz):
        return min(strategy.order + 1, steps)
    most = 0
    for places, block in _blocks(strategy, steps):
        rows, columns = np.nonzero(block)
        most = max(most, int((rows - places[columns]).max()) + 1)
    return most


def largest_column_norm(strategy: Strategy, steps: int) -> float:
    """Return the largest L2 norm of a column of the leading block of C; 0 of no steps."""
    blocks = _blocks(strategy, check_block(steps, strategy.steps))
    return max((float(np.linalg.norm(block, axis=0).max()) for _, block in blocks), default=0.0)


def _blocks(strategy: Strategy, steps: int) -> Iterator[tuple[Indices, Matrix]]:
    """Yield the columns, some at a time, with their indices."""
    for first in range(0, steps, _CHUNK):
        places = np.arange(first, min(first + _CHUNK, steps))
        yield places, strategy.columns(places, steps)
