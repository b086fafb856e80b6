"""The clip norm of a run that adapts it: what is in force, what was, and the bits of the present step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dpcore.spec.grid import nearest, step_of
from dpcore.stages.clipping.adaptive import AdaptiveClip, twice_the_bits


class RunningNorm:
    """The state of an `AdaptiveClip` in a run that begins with the norm C_0 = `initial`, at expected batch size B.

    `norms` are C_0, C_1, ...: functions of releases.
    """

    def __init__(self, adaptive: AdaptiveClip, initial: float, batch_size: float) -> None:
        self.adaptive, self.initial, self.batch_size = adaptive, float(initial), batch_size
        self.norms = [self.initial]
        # **Private**: twice the sum of the bits so far. Where the backend computes, so that no step waits for it.
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
