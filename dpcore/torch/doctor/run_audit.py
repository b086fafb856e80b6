"""The result of an audit of a torch run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class RunAudit:
    """What canaries through a run's own step showed.

    Attributes
    ----------
    claimed_epsilon : float
        Of the whole plan at `delta`.
    lower_bound : float or None
        The epsilon at `delta` of the plan with `ratio` times as much told in every step: a lower bound at the
        confidence, if batches are drawn as planned and what ran is Gaussian and alike in all steps. None where no
        accountant has a lower end.
    delta, confidence : float
        A true claim is flagged with probability at most 1 - confidence, whenever the audit stops.
    steps, canaries : int
        Taken, until it was decided or time was over; and in each of them.
    ratio : float
        The noise is at most 1 / ratio of the planned, in the terms of `dpcore.audit.betting`; 1 or more refutes.
    half_refuted : bool
        Whether it was refuted, at the same confidence, that a Gaussian mechanism with half the noise ran.
    flagged, findings : bool, tuple of str
        Whether the claim was refuted, and how.
    p_values : dict of str to float
        Of the direct checks of the first steps.
    method : str
    """

    claimed_epsilon: float
    lower_bound: float | None
    delta: float
    confidence: float
    steps: int
    canaries: int
    ratio: float
    half_refuted: bool
    flagged: bool
    findings: tuple[str, ...]
    p_values: dict[str, float]
    method: str

    @property
    def decided(self) -> bool:
        """Whether the claim, or half of its noise, was refuted."""
        return self.flagged or self.half_refuted

    @property
    def told(self) -> str:
        """One sentence: the bound beside the claim."""
        bound = "unknown" if self.lower_bound is None else f"{self.lower_bound:.4g}"
        half = ", and half the planned noise is refuted" if self.half_refuted else ""
        return (
            f"claimed epsilon {self.claimed_epsilon:.4g} at delta {self.delta:.3g}; lower bound {bound} at "
            "confidence "
            f"{self.confidence:g}, from {self.canaries} canaries in each of {self.steps} steps{half}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return every number as JSON values; an infinite epsilon is None."""
        values = {**asdict(self), "findings": list(self.findings), "decided": self.decided}
        return {name: None if isinstance(v, float) and math.isinf(v) else v for name, v in values.items()}

    def __str__(self) -> str:
        """Return the result in sentences."""
        if self.flagged:
            return f"{self.method}: {self.told} FLAGGED: the run is not what the plan says. {' '.join(self.findings)}"
        if not self.decided:
            return f"{self.method}: {self.told} Not decided: too few steps to tell the planned noise from half of it."
        return (
            f"{self.method}: {self.told} Nothing contradicts the claim. That proves no privacy: an error that these "
            "canaries do not meet stays unseen."
        )
