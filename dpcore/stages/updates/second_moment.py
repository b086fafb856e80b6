"""The second moment of the adaptive updates: its source, and how its root divides the direction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.spec.ops import UpdateSettings
from dpcore.spec.validate import Checked, Rules, choice, non_negative, positive
from dpcore.stages.updates.base import SECOND_MOMENTS


@dataclass(frozen=True, kw_only=True)
class SecondMoment(Checked):
    """Settings of an adaptive update's second moment.

    Parameters
    ----------
    second_moment : str
        What it is made of:
        "filtered": the square of what the update sees (post-processing);
        "released": the square of the released average before the filter;
        "independent": the square of the clipped average, released by itself with noise of its own;
        "joint": the same, released together with the gradient as one vector (batches of one example only);
        "public": the square of a gradient of public data that the caller supplies;
        "noiseless": the square of the clipped average without noise, which is **not private**.
    denominator : {"added", "floored"}
        ``sqrt(nuhat) + eps``, or ``max(sqrt(nuhat), eps)``.
    bias_corrected : bool
        Subtract the noise's expected share from nuhat before the root; the denominator is then floored.
    joint_scale : float or None
        c of the joint vector (g, c g^2); None takes 1 / (sqrt(2) C).
    allow_nonprivate : bool
        Must be True for "noiseless": its epsilon is infinity.

    References
    ----------
    Private adaptive optimizers, sections 3 and 4; see docs/methods/dp_adam.md.
    """

    second_moment: str = "filtered"
    denominator: str = "added"
    bias_corrected: bool = False
    joint_scale: float | None = None
    allow_nonprivate: bool = False

    rules: ClassVar[Rules] = {
        "lr": positive,
        "weight_decay": non_negative,
        "second_moment": partial(choice, SECOND_MOMENTS),
        "denominator": partial(choice, ("added", "floored")),
        "joint_scale": positive,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.denominator == "floored":
            positive(eps=self.eps)  # type: ignore[attr-defined]
        if self.bias_corrected and self.second_moment not in ("filtered", "released"):
            raise ArgumentError(
                f"bias_corrected=True: must be False for second_moment={self.second_moment!r}, whose expectation the "
                "gradient's noise does not raise"
            )
        if self.bias_corrected and self.denominator != "floored":
            raise ArgumentError(
                "bias_corrected=True: needs denominator='floored', since the corrected moment can be negative"
            )
        if self.joint_scale is not None and self.second_moment != "joint":
            raise ArgumentError(f"joint_scale={self.joint_scale!r}: is only for second_moment='joint'")
        if self.second_moment == "noiseless" and not self.allow_nonprivate:
            raise PrivacyError(
                "second_moment='noiseless': reads the clipped gradients without noise, so that epsilon is infinity; "
                "give allow_nonprivate=True for a baseline, or take another variant"
            )

    def bias(self, numbers: UpdateSettings, step: int, variances: NDArray[np.float64]) -> float:
        """Return what the noise adds to nuhat in expectation, from the variances V of the steps up to `step`."""
        raise NotImplementedError

    def prepared(self, numbers: UpdateSettings, step: int, variances: NDArray[np.float64] | None) -> UpdateSettings:
        """Return the numbers with the noise's share of nuhat as `bias`, and eps as `floor` where it is one."""
        if self.denominator == "floored":
            numbers = numbers._replace(eps=0.0, floor=numbers.eps)
        if not self.bias_corrected:
            return numbers
        assert variances is not None
        return numbers._replace(bias=self.bias(numbers, step, variances[: step + 1]))
