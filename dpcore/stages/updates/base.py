"""The protocol of an update: a rule of the port and its numbers."""

from __future__ import annotations

import math
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dpcore.errors import ArgumentTypeError
from dpcore.spec.ops import UPDATE_RULES, UpdateSettings
from dpcore.spec.validate import Checked, choice

# What the second moment is made of -> how the port's step forms it (`dpcore.spec.ops.Backend.step`).
SECOND_MOMENTS: Final = {
    "filtered": "filtered",
    "released": "released",
    "independent": "separate",
    "joint": "separate",
    "noiseless": "separate",
    "public": "given",
}


class Update(Protocol):
    """A rule of `dpcore.spec.ops.UPDATE_RULES` with its default numbers.

    The numbers are defaults: at the PyTorch edge each parameter group carries its own, and schedulers change them.
    """

    @property
    def rule(self) -> str:
        """Name of the rule."""

    @property
    def second_moment(self) -> str:
        """One of `SECOND_MOMENTS`; "filtered" for rules without one."""

    @property
    def bias_corrected(self) -> bool:
        """Whether the noise's share is subtracted from the second moment."""

    def settings(self) -> UpdateSettings:
        """Return the numbers."""

    def prepared(self, numbers: UpdateSettings, step: int, variances: NDArray[np.float64] | None) -> UpdateSettings:
        """Return the numbers that the port's rule takes at step `step` (from 0).

        `numbers` are those in force, of `settings` or of a parameter group; `variances`, (T,), the variance of the
        noise in each coordinate of the direction, by step, given where `bias_corrected`.
        """


def check_update(update: Update, steps: int) -> None:
    """Refuse an update whose rule or numbers the port does not know: one of the caller's own may have any."""
    name = f"update={type(update).__name__}(...)"
    choice(UPDATE_RULES, **{f"{name}: rule": update.rule})
    for step in () if update.bias_corrected else sorted({0, steps - 1}):
        numbers: Any = update.prepared(update.settings(), step, None)
        if not isinstance(numbers, UpdateSettings) or not all(map(math.isfinite, numbers)):
            raise ArgumentTypeError(
                f"{name}: prepared(settings, {step}, None) must be dpcore.spec.ops.UpdateSettings of finite numbers, "
                f"not {numbers!r}"
            )


class WithoutSecondMoment(Checked):
    """What updates without a second moment share."""

    second_moment = "filtered"
    bias_corrected = False

    def prepared(self, numbers: UpdateSettings, step: int, variances: Any) -> UpdateSettings:
        """Return the numbers as they are."""
        return numbers
