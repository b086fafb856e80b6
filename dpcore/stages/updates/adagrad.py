"""AdaGrad on the released gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.ops import UpdateSettings
from dpcore.spec.validate import non_negative, plain, positive
from dpcore.stages.updates.second_moment import SecondMoment


@dataclass(frozen=True)
class AdaGrad(SecondMoment):
    """``nu <- nu + g^2;  x <- x - lr g / sqrt(nu)``, with 0/0 = 0; weight decay is added to the gradient.

    Parameters
    ----------
    lr : float
        Learning rate.
    eps : float
        Added to the root, or, with ``denominator="floored"``, the least denominator (1 with independent moments).
    weight_decay : float
        L2 penalty.
    second_moment, denominator, bias_corrected, joint_scale, allow_nonprivate
        See `SecondMoment`.

    References
    ----------
    Private adaptive optimizers, algorithm 3.
    """

    lr: float
    eps: float = 0.0
    weight_decay: float = 0.0
    rule: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        plain(self)
        positive(lr=self.lr)
        non_negative(weight_decay=self.weight_decay)
        self._check(self.eps)

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr, self.weight_decay, eps=self.eps)

    def prepared(self, numbers: UpdateSettings, step: int, variances: NDArray[np.float64] | None) -> UpdateSettings:
        """Return the numbers with the noise's share of nu, ``sum_{i<=t} V_i``, as `bias`, and eps as `floor`."""
        if self.denominator == "floored":
            numbers = numbers._replace(eps=0.0, floor=numbers.eps)
        if not self.bias_corrected:
            return numbers
        assert variances is not None
        return numbers._replace(bias=float(variances[: step + 1].sum()))
