"""DOPPLER's optimal FIR filter: weights estimated from the released gradients themselves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from dpcore.errors import ArgumentError
from dpcore.spec.ops import FilterCoefficients
from dpcore.spec.validate import Checked, Rules, choice, integer, non_negative, number

_LEAST_POWER = 1e-3


@dataclass(frozen=True)
class OptimalFIR(Checked):
    """``ghat_t = sum_{tau=0..nb} b_tau g_{t-tau}``, b from an estimate of the gradient's autocorrelation.

    Adaptive: the weights are functions of released averages, so they cost no privacy, but they cannot be known before
    the run as those of a recurrence are.

    Parameters
    ----------
    length : int
        nb, at least 1: the number of earlier released averages that are kept and weighted with the present one.
    weighting : {"optimal", "paper"}
        "optimal" maximizes the signal-to-noise ratio among weights that add up to 1,
        ``b proportional to c + ||c|| / sqrt(nb + 1)``; "paper" takes ``b proportional to c``, the printed form.

    Notes
    -----
    The estimate, with means over the steps at which both gradients exist, is

        chat_tau = max(0, mean[<g_t, g_{t-tau}> - max(||g_{t-tau}||^2 - d s^2, 0) / 2])
                   / mean[max(||g_t||^2 - d s^2, 1e-3)]

    for tau >= 1, and chat_0 = 1/2 by definition: estimated like the others it would contain the noise. The products of
    different steps do not, for their noise is independent; under correlated noise the estimate is biased by it.

    The paper has no ``max(0, .)`` in the numerator: its c_tau may be negative, and ``b = c / sum c`` is then no
    weighting: at c = (1/2, -1/2) it divides by 0, and at (1/2, -0.4) b = (5, -4) multiplies the noise's variance by
    41. Noise alone makes the estimate of a small c_tau negative. With the maximum every weight lies in [0, 1], so that
    no estimate amplifies the noise. Where all c_tau >= 0 the two agree.

    The ratio of signal to noise is ``<c, b> / ||b||^2``. Under ``<1, b> = 1`` it is the quadratic form
    ``<c, b> <1, b> / ||b||^2``, whose matrix ``(c 1' + 1 c') / 2`` has its largest eigenvalue,
    ``(sum c + ||c|| sqrt(n)) / 2``, at ``c / ||c|| + 1 / sqrt(n)``. At step t < nb only the first t + 1 of the c count.

    References
    ----------
    DOPPLER (Zhang et al.), section 5.3, equation 7 and "Optimal FIR filter".
    """

    length: int
    weighting: str = "optimal"
    order: ClassVar[int] = 0
    adaptive: ClassVar[bool] = True

    rules: ClassVar[Rules] = {"length": partial(integer, 1), "weighting": partial(choice, ("optimal", "paper"))}

    @property
    def memory(self) -> int:
        """How many released averages before the present one must be kept."""
        return self.length

    def coefficients(self, step: int) -> tuple[FilterCoefficients, ...]:
        """Refuse: there are no coefficients before the run."""
        raise ArgumentError(
            f"filter={self!r}: its weights depend on the released averages; use weights(statistics, step)"
        )

    def initial(self) -> tuple[float, ...]:
        """Return the statistics before the first step, 2 + 2 nb zeros.

        They are the number of steps, the mean power, the nb means of the products' excess, and the powers of the nb
        last averages, the latest first.
        """
        return (0.0,) * (2 + 2 * self.length)

    def observe(self, statistics: Sequence[float], products: Sequence[float], noise_power: float) -> tuple[float, ...]:
        """Return the statistics with one more released average taken in.

        `statistics` are of the t steps before, `products` are ``<g_t, g_{t-tau}>`` over all coordinates for
        tau = 0..min(t, nb), and `noise_power` is d s^2, the expected squared norm of the noise in g_t.
        """
        n = self.length
        t = self._steps(statistics)
        last = min(t, n)
        if len(products) != last + 1:
            raise ArgumentError(f"len(products)={len(products)}: must be {last + 1} at step {t}, tau = 0..{last}")
        products = [number(products=value) for value in products]
        excess = products[0] - non_negative(noise_power=noise_power)
        power = statistics[1] + (max(excess, _LEAST_POWER) - statistics[1]) / (t + 1)
        means, past = list(statistics[2 : 2 + n]), list(statistics[2 + n :])
        for tau in range(1, len(products)):
            sample = products[tau] - max(past[tau - 1], 0.0) / 2
            means[tau - 1] += (sample - means[tau - 1]) / (t + 1 - tau)
        return (float(t + 1), power, *means, excess, *past[:-1])

    def autocorrelation(self, statistics: Sequence[float]) -> tuple[float, ...]:
        """Return chat_0..chat_nb."""
        if self._steps(statistics) == 0:
            return (0.5,) + (0.0,) * self.length
        power = statistics[1]
        return (0.5, *(max(0.0, mean) / power for mean in statistics[2 : 2 + self.length]))

    def weights(self, statistics: Sequence[float], step: int) -> tuple[float, ...]:
        """Return b_0..b_nb of step `step` (from 0); they add up to 1, and those before step 0 are 0."""
        c = self.autocorrelation(statistics)[: integer(0, step=step) + 1]
        lift = math.hypot(*c) / math.sqrt(len(c)) if self.weighting == "optimal" else 0.0
        total = math.fsum(c) + len(c) * lift
        return tuple((value + lift) / total for value in c) + (0.0,) * (self.length + 1 - len(c))

    def _steps(self, statistics: Sequence[float]) -> int:
        if len(statistics) != 2 + 2 * self.length:
            raise ArgumentError(f"len(statistics)={len(statistics)}: must be {2 + 2 * self.length}")
        return int(statistics[0])
