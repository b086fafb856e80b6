"""A clip norm that follows a quantile of the examples' norms, which is released privately with every sum."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dpcore.spec.grid import nearest, step_of
from dpcore.spec.validate import non_negative, open_unit, plain, positive

REACH: Final = 1e6
"""The clip norm stays within its initial value divided by this and times this: post-processing of the releases."""

NO_GRADIENT: Final = 1e-8
"""An example of a smaller norm has no gradient, and gives no bit. The norms that backends state are upper bounds: on
tensor cores that of a zero gradient is 2^-40 for a layer, so that 10^4 of them, with weights of 100, stay below."""

DEFAULT_SHARE: Final = 1 / 20
"""The noise on the bits by default, relative to the expected batch size: the paper's m / 20."""


@dataclass(frozen=True)
class AdaptiveClip:
    """``C_{t+1} = C_t exp(-eta_C (p_t - gamma))``, with p_t the noisy share of norms that were at most C_t.

    Parameters
    ----------
    target_quantile : float
        gamma, strictly between 0 and 1: the share of norms that the clip should not change. 0.5 is the median.
    learning_rate : float
        eta_C > 0, of the logarithm of the norm. At 0.2 and the median, a step of B examples changes the norm by about a
        tenth at most, noise aside.
    bit_noise_std : float or None
        sigma_b: standard deviation of the noise on the sum of the bits, in examples. None takes a twentieth of the
        expected batch size. Must be more than half of the noise multiplier, or the bits cost more than the whole
        release may (`dpcore.plan.scales.raised_multiplier`).

    Notes
    -----
    Each example of the batch gives a bit: +1/2 if the norm of its vector is at most C_t, -1/2 if it is larger or not
    finite, 0 if the vector is zero, since an example that contributes nothing must change neither sum. The norm is the
    clip's own, of the clipped vector: an upper bound, rounding included, which depends only on that example, so a bit
    that rounding decides costs nothing more. With s_t the sum of the bits and B the *expected*
    batch size, ``p_t = (s_t + sigma_b z_t) / B + 1/2``. The normals z_t are row t of a stream of their own.

    Guarantees
    ----------
    An example moves the sum of the bits by at most 1/2 if it is added, removed or zeroed out, and by 1 if it is
    replaced. The noise on the clipped sum is raised so that both together have the cost of the noise multiplier. C_t is
    a function of releases: it is public, and later steps may depend on it.

    References
    ----------
    Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive Clipping", 2021, section 2 and
    algorithm 1.
    """

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    bit_noise_std: float | None = None

    def __post_init__(self) -> None:
        plain(self)
        open_unit(target_quantile=self.target_quantile)
        positive(learning_rate=self.learning_rate)
        if self.bit_noise_std is not None:
            non_negative(bit_noise_std=self.bit_noise_std)

    def noise_on_bits(self, batch_size: float) -> float:
        """Return sigma_b for the expected batch size B."""
        return DEFAULT_SHARE * batch_size if self.bit_noise_std is None else float(self.bit_noise_std)

    def next_norm(self, norm: float, noisy_bits: float, batch_size: float, initial: float) -> float:
        """Return C_{t+1} of C_t, ``s_t + sigma_b z_t``, B, and C_0, around which the norm is kept: see `limits`."""
        share = noisy_bits / batch_size + 0.5
        exponent = -self.learning_rate * (share - self.target_quantile)
        least, most = limits(initial)
        return min(max(norm * math.exp(min(exponent, 700.0)), least), most)


def limits(initial: float) -> tuple[float, float]:
    """Return the least and the greatest clip norm of a run that began with `initial`."""
    return initial / REACH, initial * REACH


def twice_the_bits(norms: Any, norm: float) -> Any:
    """Return twice the sum of the bits of a block of examples, from their norms (B,) and C_t: an integer."""
    # A certified norm may be a little above 0 for an example without a gradient. True of NaN.
    counted = ~(norms < NO_GRADIENT)
    return 2 * ((norms <= norm) & counted).sum() - counted.sum()


class RunningNorm:
    """The state of an `AdaptiveClip` in a run that begins with the norm C_0 = `initial`, at expected batch size B.

    `norms` are C_0, C_1, ...: functions of releases.
    """

    def __init__(self, adaptive: AdaptiveClip, initial: float, batch_size: float) -> None:
        self.adaptive, self.initial, self.batch_size = adaptive, float(initial), batch_size
        self.norms = [self.initial]
        # **Private**: twice the sum of the bits so far. It is on the backend's device, so that no step waits for it.
        self._twice: Any = 0

    @property
    def norm(self) -> float:
        """C_t, the clip norm in force."""
        return self.norms[-1]

    def add(self, norms: Any) -> None:
        """Add the bits of a block of examples, given their norms."""
        self._twice = self._twice + twice_the_bits(norms, self.norm)

    def add_up(self, added: Callable[[Sequence[float]], list[float]]) -> None:
        """Add the bits of all processes; `added` sums over them, and is exact below 2^53."""
        self._twice = int(added([float(self._twice)])[0])

    def forget(self) -> None:
        """Begin the sum of the bits with nothing."""
        self._twice = 0

    def following(self, normal: float, bits: int, raised: float = 1.0) -> float:
        """Return C_{t+1}, of the bits so far and a standard normal number on a grid. A release.

        The noise is `raised`, and once more for the grid of this release: an example moves the sum by 1/2, and its
        rounding by 1.5 steps.
        """
        deviation = raised * self.adaptive.noise_on_bits(self.batch_size)
        noisy, step = int(self._twice) / 2, step_of(deviation / (1 - 3 * step_of(deviation, bits)), bits)
        if step:
            noisy = (nearest(noisy * (1 / step)) + nearest(normal * 2.0**bits)) * step
        return self.adaptive.next_norm(self.norm, noisy, self.batch_size, self.initial)

    def keep(self, step: int, norm: float) -> None:
        """Let `norm` be C_step."""
        self.norms += [self.norm] * (step - len(self.norms))
        self.norms.append(norm)

    def at(self, steps: int) -> list[float]:
        """Return C_0 .. C_steps; steps that an interruption cut off left the norm as it was."""
        return [*self.norms, *[self.norm] * (steps + 1 - len(self.norms))]
