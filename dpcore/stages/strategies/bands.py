"""How far down the columns of C reach: what amplification by cyclic sampling rests on."""

from __future__ import annotations

import numpy as np

from dpcore.stages.strategies.banded import Banded
from dpcore.stages.strategies.base import Strategy, check_block
from dpcore.stages.strategies.identity import Identity
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
    for first in range(0, steps, _CHUNK):
        places = np.arange(first, min(first + _CHUNK, steps))
        rows, columns = np.nonzero(strategy.columns(places, steps))
        most = max(most, int((rows - places[columns]).max()) + 1)
    return most


def largest_column_norm(strategy: Strategy, steps: int) -> float:
    """Return the largest L2 norm of a column of the leading block of C; 0 of no steps."""
    steps, largest = check_block(steps, strategy.steps), 0.0
    for first in range(0, steps, _CHUNK):
        block = strategy.columns(np.arange(first, min(first + _CHUNK, steps)), steps)
        largest = max(largest, float(np.linalg.norm(block, axis=0).max()))
    return largest
