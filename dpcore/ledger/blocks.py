"""The size of a block of reserved rows: small enough to lose, large enough that writing is cheap."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# A crash counts a block's rows in vain: at most this share of the rows planned, so that a run has some hundred blocks.
LARGEST_SHARE = 0.01
_FEWEST = 4

# Writes take at most this share of the time between two reservations, as far as the largest block allows.
SHARE = 0.01

# A block may be so many times the one before: the first ones are small, since nothing has been measured.
_GROWTH = 4


def largest(steps: int) -> int:
    """Return the rows of the largest block of a plan."""
    return max(_FEWEST, int(LARGEST_SHARE * steps))


class Blocks:
    """Measures what rows and durable writes take, in the clock's seconds, and says how long the next block is."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._largest, self._clock = largest(steps), clock
        self._last: tuple[float, int] | None = None
        self._size, self._writing = 0, 0.0

    def next_size(self, row: int) -> int:
        """Return the size of the block that begins at `row`."""
        if self._last is None:
            self._size = 1
            return 1
        since, before = self._last
        rows = max(1, row - before)
        pace = max((self._clock() - since) / rows, 1e-9)
        wanted = math.ceil(self._writing / SHARE / pace)
        self._size = max(1, min(self._largest, _GROWTH * self._size, wanted))
        return self._size

    def wrote(self, row: int, seconds: float) -> None:
        """Note that a block was written at `row`, and how long that took."""
        self._last, self._writing = (self._clock(), row), seconds

    @property
    def now(self) -> float:
        """The clock's time in seconds."""
        return self._clock()
