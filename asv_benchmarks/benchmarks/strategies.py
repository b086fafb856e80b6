"""The search for optimal strategies."""

from __future__ import annotations

from typing import Any

from dpcore import strategies


class Optimal:
    """Of prefix sums, with the certificate; nothing is read from disk."""

    params: Any = ("dense", "banded-toeplitz", "toeplitz", "blt", "banded-inverse")
    param_names: Any = ("kind",)

    def time_1024_steps(self, kind: str) -> None:
        """One epoch."""
        strategies.optimal(kind, 1024, keep=False)

    def track_percent_above_the_bound(self, kind: str) -> float:
        """How far the error is above that of the best mechanism."""
        above = strategies.optimal(kind, 1024, keep=False).above
        assert above is not None
        return 100 * above


class Epochs:
    """Six epochs of 43 steps: dense, with its certificate."""

    def time_dense(self) -> None:
        """One search."""
        strategies.optimal("dense", 258, epochs=6, keep=False)
