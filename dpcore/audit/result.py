"""The result of an audit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class AuditResult:
    """A lower bound on epsilon beside the claim.

    Attributes
    ----------
    claimed_epsilon : float
        The plan's epsilon at `delta`: an upper bound, by the accountant that gives the smallest.
    lower_bound, lower_bound_any : float
        Epsilon at `delta` is at least this, with the stated confidence, if `assumes` holds; and without assuming what
        kind of mechanism it is: much smaller, for that cannot exceed about the log of the number of canaries.
    delta, confidence : float
        The bound is too high, or an honest run flagged, with probability at most 1 - confidence.
    flagged, findings : bool, tuple of str
        Whether the run is not what the plan says (the canaries were told apart better than the claim allows, or a
        direct check failed), and why, one sentence each.
    assumes : str
        What `lower_bound` rests on.
    canaries_in, canaries_out : int
        Canaries that were counted: half of all; the other half chose the threshold.
    false_positive_rate, false_negative_rate : float
        Upper bounds on the adversary's error rates.
    power, claimed_power : float
        Lower bound on the adversary's true positive rate, and what the claim allows at that false positive rate.
    noise_ratio : float
        Standard deviation of the noise on untouched coordinates over the planned one.
    p_values : dict of str to float
        Of the direct checks: how likely the planned run shows something as unusual.
    method : str
    """

    claimed_epsilon: float
    lower_bound: float
    lower_bound_any: float
    delta: float
    confidence: float
    flagged: bool
    findings: tuple[str, ...]
    assumes: str
    canaries_in: int
    canaries_out: int
    false_positive_rate: float
    false_negative_rate: float
    power: float
    claimed_power: float
    noise_ratio: float
    p_values: dict[str, float]
    method: str

    def to_dict(self) -> dict[str, Any]:
        """Return every number as JSON values; an infinite epsilon is None."""
        values = asdict(self)
        values["findings"] = list(self.findings)
        return {
            name: None if isinstance(value, float) and math.isinf(value) else value for name, value in values.items()
        }

    def __str__(self) -> str:
        """Return the result in sentences."""
        said = (
            f"{self.method}: claimed epsilon {self.claimed_epsilon:.4g} at delta {self.delta:.3g}; the audit shows "
            f"epsilon >= {self.lower_bound:.4g} at confidence {self.confidence:g}, from {self.canaries_in} canaries in "
            f"and {self.canaries_out} out. "
        )
        if self.flagged:
            return said + "FLAGGED: the run is not what the plan says. " + " ".join(self.findings)
        return said + (
            "Nothing contradicts the claim. That proves no privacy: an error that these canaries do not meet stays "
            "unseen."
        )
