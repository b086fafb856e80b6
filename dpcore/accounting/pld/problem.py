"""The composition to compute, and the tails to cut."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dpcore.accounting.phases import AllocationStep, Phases, PoissonStep
from dpcore.accounting.pld import discretize, loss
from dpcore.accounting.pld.allocation import Allocation, Losses
from dpcore.accounting.pld.loss import Array, Family, center
from dpcore.accounting.pld.moments import Moments
from dpcore.spec import special

_SAMPLE = 24  # distinct steps that an estimate looks at
_RARE = 1e-5  # of delta: losses of an epoch that may count as infinite


@dataclass(frozen=True)
class Problem:
    """All steps of an event, how many there are, and the directions that differ.

    A step's outcomes are resolved up to the standard normal quantiles `low` and `high`.
    """

    families: tuple[Losses, ...]
    steps: int
    directions: tuple[str, ...]
    low: float
    high: float

    @property
    def eta(self) -> float:
        """Bound on the error of the curve of a step relative to the P-mass above, from that of ndtr in its tail.

        Outcomes are looked at up to `high` away from either center, which lie 1/sigma apart; past 39 all is 0. At x the
        rounding of x by 2 u changes the tail by 2 u x^2; ndtr and what else is computed add some 10 u. That is no
        proof: no error is proven of these functions. Against 60 digits, a sixteenth of this bound was the most that was
        measured.
        """
        apart = max(float((1.0 / family.sigmas).max()) for family in self.families)
        long = max((family.batches for family in self.families if isinstance(family, Allocation)), default=0)
        terms = 256.0 + 64.0 * long  # those of a sum of so many, each with some roundings of its own
        return (terms + 16.0 * min(39.0, max(self.low, self.high) + apart) ** 2) * 2.0**-52

    @property
    def tilts(self) -> bool:
        """Whether the masses of a step are known the better, the nearer the tilt is to that of the composition."""
        return any(isinstance(family, Allocation) for family in self.families)

    @cached_property
    def sample(self) -> Problem:
        """A problem of few distinct steps that is about the same; this one if it has few.

        Steps are drawn evenly along their shares of the sum of chi-squared divergences, which is what a composition is
        made of to first order, and counted such that each draw stands for an equal share. For estimates, not bounds.
        """
        shares = [family.counts * _divergences(family) for family in self.families]
        if sum(map(len, shares)) <= _SAMPLE:
            return self
        total = float(sum(share.sum() for share in shares))
        before, found = 0.0, []
        for family, share in zip(self.families, shares, strict=True):
            ends = before + np.cumsum(share)
            first, last = math.ceil(before / total * _SAMPLE - 0.5), math.ceil(float(ends[-1]) / total * _SAMPLE - 0.5)
            draws = np.searchsorted(ends, (np.arange(first, last) + 0.5) * total / _SAMPLE)
            before = float(ends[-1])
            chosen, times = np.unique(np.minimum(draws, len(share) - 1), return_counts=True)
            if len(chosen):
                each = times * (total / _SAMPLE) / share[chosen]
                counts = np.maximum(1, np.rint(each * family.counts[chosen])).astype(np.int64)
                found.append(family.of(chosen, counts))
        exact = [family for family in found if isinstance(family, Family)]
        others = [family for family in found if not isinstance(family, Family)]
        return replace(self, families=(*loss.joined(exact), *others))

    def aimed(self, theta: float, loss: float) -> Problem:
        """Return the problem for a tilt, and the loss of all steps together that is the mean under it."""
        return replace(self, families=tuple(family.aimed(theta, loss / self.steps) for family in self.families))

    def grids(self, direction: str, h: float, fine: int) -> list[tuple[Losses, Array, discretize.Integers]]:
        """Return offsets and points for each family."""
        fitted = [family.fitted(fine) for family in self.families]
        return [(family, *self._grid(family, direction, h, fine)) for family in fitted]

    def _grid(self, family: Losses, direction: str, h: float, fine: int) -> tuple[Array, discretize.Integers]:
        offsets = center(family, direction, h)
        bottom, top = family.reach(direction, self.low, self.high)
        low, high = float(((bottom - offsets) / h).min()), float(((top - offsets) / h).max())
        return offsets, discretize.points(low, high, fine)

    def rough(self, direction: str) -> Moments:
        """Return the log moments of the sample, from a grid that resolves every scale by some percent."""
        parts = []
        for family in (part.bounded("rough") for part in self.sample.families):
            bottom, top = family.reach(direction, self.low, self.high)
            h = float(np.maximum(top, -bottom).max()) * 2.0**-22
            parts.append(discretize.upper(family, direction, h, *self._grid(family, direction, h, 8)))
        return Moments(parts)


def problem(found: Phases, log_delta: float) -> Problem:
    """Return the problem of phases whose mu is finite, for deltas of about that size."""
    steps = list(found.steps)
    if found.mu > 0.0:
        steps.append((PoissonStep(((1.0, 1.0, 1.0 / found.mu),)), 1))
    whole = [(step, count) for step, count in steps if isinstance(step, AllocationStep)]
    families: tuple[Losses, ...] = tuple(
        loss.families([(step, count) for step, count in steps if not isinstance(step, AllocationStep)])
    )
    count = int(sum(family.counts.sum() for family in families)) + sum(count for _, count in whole)
    one_sided = not whole and all(family.subset or bool(np.all(family.rates == 1.0)) for family in families)
    low = -float(special.ndtri_exp(math.log(1e-10) - math.log(count)))
    high = -float(special.ndtri_exp(min(log_delta, math.log(1e-3)) - math.log(1e7) - math.log(count)))
    rare = math.log(_RARE) + min(log_delta, math.log(1e-3)) - math.log(count)
    families += tuple(Allocation(step.batches, step.noise_multiplier, np.array([times]), rare) for step, times in whole)
    return Problem(families, count, ("remove",) if one_sided else ("remove", "add"), low, high)


def _divergences(family: Losses) -> Array:
    exponent = np.minimum(1.0 / family.sigmas**2, 300.0)
    found: Array = np.maximum((family.weights * family.rates**2 * np.expm1(exponent)).sum(axis=1), 1e-300)
    return found
