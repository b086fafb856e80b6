"""The results of audits: of a method on canaries alone, and of a torch run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

_NOTHING = (
    "Nothing contradicts the claim. That proves no privacy: an error that these canaries do not meet stays unseen."
)


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
        return _json(self)

    def __str__(self) -> str:
        """Return the result in sentences."""
        said = (
            f"{self.method}: claimed epsilon {self.claimed_epsilon:.4g} at delta {self.delta:.3g}; the audit shows "
            f"epsilon >= {self.lower_bound:.4g} at confidence {self.confidence:g}, from {self.canaries_in} canaries in "
            f"and {self.canaries_out} out. "
        )
        if self.flagged:
            return said + "FLAGGED: the run is not what the plan says. " + " ".join(self.findings)
        return said + _NOTHING


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
            f"claimed epsilon {self.claimed_epsilon:.4g} at delta {self.delta:.3g}; lower bound {bound} at confidence "
            f"{self.confidence:g}, from {self.canaries} canaries in each of {self.steps} steps{half}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return every number as JSON values; an infinite epsilon is None."""
        return {**_json(self), "decided": self.decided}

    def __str__(self) -> str:
        """Return the result in sentences."""
        if self.flagged:
            return f"{self.method}: {self.told} FLAGGED: the run is not what the plan says. {' '.join(self.findings)}"
        if not self.decided:
            return f"{self.method}: {self.told} Not decided: too few steps to tell the planned noise from half of it."
        return f"{self.method}: {self.told} {_NOTHING}"


def _json(result: Any) -> dict[str, Any]:
    values = {**asdict(result), "findings": list(result.findings)}
    return {name: None if isinstance(v, float) and math.isinf(v) else v for name, v in values.items()}
