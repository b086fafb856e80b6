"""The sensitivity of the sum to one example: the number behind every noise scale."""

from __future__ import annotations

from dataclasses import dataclass

from dpcore.spec.rounding import ROUNDING_COUNTED, rounding


@dataclass(frozen=True)
class Sensitivity:
    """An L2 bound on one example's contribution to the sum, C_eff in the docs.

    Attributes
    ----------
    contribution : float
        No example adds a vector of larger L2 norm to the sum.

    Notes
    -----
    Adding or removing an example, or replacing it by one with zero gradient (zero-out), moves the sum by at most
    `contribution`; replacing it by any other example, by at most twice that. The noise multiplier of every event is
    relative to `contribution`, and the event knows its own adjacency.
    """

    contribution: float

    def of_sums(self, terms: int) -> Sensitivity:
        """Return the same for computed sums of at most `terms` vectors, where their rounding counts."""
        share = rounding(terms)
        return self if share <= ROUNDING_COUNTED else Sensitivity(self.contribution * (1 + share))
