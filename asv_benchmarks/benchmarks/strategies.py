"""The search for optimal strategies, and the noise that they stream."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpcore import strategies
from dpcore.mechanism.noise_state import correlated
from dpcore.spec.ops import FilterCoefficients, RingCoefficients
from dpcore.spec.rounded_normal import FRACTION_BITS

from .common import BACKENDS, CHECK, KEY, load, synchronize, values

SIZE = 10_000 if CHECK else 1_000_000
SEARCHED = 64 if CHECK else 1024


class Optimal:
    """Of prefix sums, with the certificate; nothing is read from disk."""

    params: Any = ("dense", "banded-toeplitz", "blt", "banded-inverse")
    param_names: Any = ("kind",)

    def time_1024_steps(self, kind: str) -> None:
        """One epoch."""
        strategies.optimal(kind, SEARCHED, keep=False)

    def track_percent_above_the_bound(self, kind: str) -> float:
        """How far the error is above that of the best mechanism."""
        above = strategies.optimal(kind, SEARCHED, keep=False).above
        assert above is not None
        return 100 * above


class Epochs:
    """Six epochs of 43 steps: dense, with its certificate."""

    def time_dense(self) -> None:
        """One search."""
        strategies.optimal("dense", 48 if CHECK else 258, epochs=6, keep=False)


class Ring:
    """One step of a ring of 32 vectors of a million float64 numbers, the noise itself drawn before."""

    params: Any = BACKENDS
    param_names: Any = ("backend",)

    def setup(self, backend: str) -> None:
        """Fill the ring; its place is in the middle."""
        self.ops = load(backend)
        self.arrays, self.z = [values(SIZE, seed).astype(float) for seed in range(32)], values(SIZE, 32).astype(float)
        self.weights = tuple(0.5 ** np.arange(1, 33).astype(float))
        self.x, self.vectors = self.ops.from_numpy(self.z), [self.ops.from_numpy(array) for array in self.arrays]
        self.coefficients = RingCoefficients(self.weights, 13, 2.0)
        self.recurrence = FilterCoefficients((1.0,), self.weights, 2.0)
        self.time_by_index(backend)  # kernels compile
        self.time_by_recurrence(backend)

    def time_by_index(self, backend: str) -> None:
        """`Backend.correlate` with a ring: 32 vectors read, one written."""
        self.ops.correlate(self.x, self.vectors, self.coefficients)
        synchronize(backend)

    def time_by_recurrence(self, backend: str) -> None:
        """The same noise in transposed direct form II: 32 vectors read and written."""
        self.ops.correlate(self.x, self.vectors, self.recurrence)
        synchronize(backend)

    def time_plain_numpy(self, backend: str) -> None:
        """A ring as one writes it down, on whole arrays, whatever the backend."""
        n = self.z.copy()
        for j, weight in enumerate(self.weights, start=1):
            n += weight * self.arrays[(13 - j) % 32]
        n /= 2.0
        self.arrays[13][...] = n


STEPS = 256
STREAMS: dict[str, Any] = {
    "ring of 32": lambda: strategies.BandedToeplitz(tuple(strategies.SquareRoot(33).first_column(33).tolist())),
    "blt, 4 buffers": lambda: strategies.BLT((0.2, 0.1, 0.05, 0.02), (0.99, 0.9, 0.5, 0.1), STEPS),
    "banded inverse, 4 bands": lambda: strategies.banded_inverse_square_root(4, STEPS),
    "banded inverse, 4 bands, redrawn": lambda: strategies.in_blocks(
        strategies.banded_inverse_square_root(4, STEPS), 1
    ),
    "dense": lambda: strategies.SquareRoot(STEPS),
    "dense by blocks of 16": lambda: strategies.in_blocks(strategies.SquareRoot(STEPS), 16),
}


class Streaming:
    """Sixteen steps of correlated noise for a million float32 parameters, from step 112 of 256; draws included."""

    params: Any = (BACKENDS, tuple(STREAMS))
    param_names: Any = ("backend", "strategy")
    timeout = 600.0
    number, repeat, rounds = 1, 3, 1

    def setup(self, backend: str, strategy: str) -> None:
        """Make the vectors that are kept."""
        self.ops, self.strategy = load(backend), STREAMS[strategy]()
        like = self.ops.from_numpy(values(SIZE))
        self.state = [self.ops.zeros_like(like, "float64") for _ in range(self.strategy.order)]

    def normal(self, row: int, start: int = 0, stop: int | None = None) -> Any:
        """Draw a row of Z."""
        return self.ops.normal(KEY, row, 0, start, (SIZE if stop is None else stop) - start)

    def time_16_steps(self, backend: str, strategy: str) -> None:
        """A block, if there are blocks."""
        for step in range(112, 128):
            correlated(self.ops, self.strategy, step, self.state, self.normal, FRACTION_BITS)
        synchronize(backend)
