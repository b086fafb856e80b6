"""The privacy loss of one epoch of random allocation: an example enters one of t batches, each with probability 1/t.

What an adversary sees of the example, whatever the others do, is dominated by t numbers with noise of its own each: all
N(0, 1) under Q, and under P one of them, drawn at random, N(1/s, 1), with s the noise multiplier. (The batch is drawn
before the epoch. What the example adds may depend on earlier releases; but that changes only the direction of a vector,
and the noise looks the same from every side.) With X_i = e^(z_i/s - 1/(2 s^2)) the likelihood ratio is

    L = dP/dQ = (X_1 + ... + X_t) / t,     X_i independent, lognormal, E_Q X_i = 1.

"Remove" has the loss log L under P, "add" the loss -log L under Q. Both curves are expectations of convex functions of
the sum S = t L, so a law of X that is larger in the convex order (a mass is split between two points that keep its
mean) bounds them from above, and one that is smaller (masses are merged at their mean) from below. On a grid of step g
both differ from the true law at second order, and the law of S is a t-fold convolution: one power of a transform. P
needs none of its own: dP = L dQ.

- **Ends.** X above a cap: lost to infinity under P ("remove", upper), moved down to it ("add", upper: the loss grows),
  or left out (lower).
- **Ranges.** Sums are told apart by the interval in which their largest X lies, and each kind has a grid of its own:
  one that reaches to the rare, large X is too coarse for all others. X is split or merged within its interval, so each
  kind's law is larger or smaller in the convex order, and so is the mixture.
- **Tilt.** Q-masses are multiplied by e^(r S), so that those that matter are the large ones, as in `compose`. Several
  tilts bound the same masses; every part of the grid takes the one that knows them best.
- **Window.** The transform adds up what lies N points apart. The tilted mass above W = N g is at most e^(K(v) - v W)
  for every v > 0, with K the log moment of the tilted sum: B. Upper: what is aliased into the window only adds; what
  left it goes to infinity ("remove") or down to its end ("add"). Lower: no point gains more than B, and each gives so
  much away. Without the tilt the mass above is at most B e^(-r W), for v >= -r; under P, at most S / (t L) <=
  e^((S - W)/W) times L at W, for v >= 1/W.
- **Rounding.** With e the L2 error of the transform, as in `compose`, at most sqrt(m) e is moved past any of m points
  in a row: so much is added at the far end of each block, or taken away from there (`moved`). That of the masses
  of X is a relative error of the tail beyond, as in `discretize`: scaling X by e^eta covers it, and with X all losses.

References
----------
Chua et al., "Balls-and-Bins Sampling for DP-SGD", 2024 (the pair); Feldman and Shenfeld, "Privacy amplification by
random allocation", 2025. The bounds are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from dpcore.accounting.pld.lognormal_sum import TiltedSum, masses, ranges, step, transformed
from dpcore.accounting.pld.loss import Family
from dpcore.errors import PrivacyError
from dpcore.spec import special

Array = npt.NDArray[np.float64]

_RANGE = 34.0  # of the tilt's exponent: beyond, a tail that falls slower than the tilt would be everything
_TILTS = (25.0, 8.0, 3.0, 1.0, 0.3, 0.0)  # each is best somewhere
_STEEPEST = 0.5  # tilt from a point of the grid to the next; without a tilt there is always a law
_POINTS = 160  # of the window, for each point per doubling in a grid of losses
_MOST_POINTS = 1 << 18
FAR, _FARTHER = 20.0, 200.0  # times the mean, and the sum of interest: "add" does not tell larger ones apart


@dataclass(frozen=True)
class Law:
    """Losses (n,), ascending, with their P-masses and Q-masses, and the P-mass at infinity."""

    losses: Array
    p: Array
    q: Array
    infinite: float

    def masses(self, edges: Array) -> tuple[Array, Array]:
        """Return the P-mass and the Q-mass (1, n) of each interval of losses, which holds its lower edge."""
        ends = np.searchsorted(self.losses, edges[0])
        filled = np.flatnonzero(ends[1:] > ends[:-1])
        found = np.zeros((2, 1, edges.shape[1] - 1))
        for mass, sums in zip((self.p, self.q), found, strict=True):
            if len(filled):  # sums of positive numbers: no digits are lost in the tails
                begins = np.append(ends[filled], ends[filled[-1] + 1])
                sums[0, filled] = np.add.reduceat(np.append(mass, 0.0), begins)[:-1]
        if edges[0, -1] == np.inf:
            found[0, 0, -1] += self.infinite
        return found[0], found[1]

    def reach(self, below: float, above: float) -> tuple[Array, Array]:
        """Return losses (1, 1) with no more than about these P-masses beyond them."""
        rising, falling = np.cumsum(self.p), np.cumsum(self.p[::-1])
        first = min(int(np.searchsorted(rising, below)), len(rising) - 2)
        last = len(falling) - 1 - min(int(np.searchsorted(falling, above)), len(falling) - 2)
        return self.losses[None, first : first + 1], self.losses[None, max(last, first + 1)][None, None]


@dataclass(frozen=True)
class Allocation:
    """Epochs of one kind, in the place of a `Family` of steps.

    Attributes
    ----------
    batches : int
        t, 2 or more.
    noise_multiplier : float
    counts : (1,) int64
        Epochs.
    log_rare : float
        Log of the P-mass that may count as lost to infinity.
    theta, loss : float
        Tilt of the composition, and the loss of an epoch that is the mean under it.
    size : int
        Points of the window, about.
    bound : {"upper", "lower", "rough"}
        The last one is none.
    """

    batches: int
    noise_multiplier: float
    counts: npt.NDArray[np.int64]
    log_rare: float
    theta: float = 0.0
    loss: float = 0.0
    size: int = 1 << 13
    bound: str = "upper"

    subset: ClassVar[bool] = False

    @property
    def weights(self) -> Array:
        """One, (1, 1): an epoch is no mixture."""
        return np.ones((1, 1))

    @property
    def rates(self) -> Array:
        """The rate of one sampled step with the same chi-squared divergence, (1, 1)."""
        return np.full((1, 1), self.batches**-0.5)

    @property
    def sigmas(self) -> Array:
        """The noise multiplier, (1, 1)."""
        return np.full((1, 1), self.noise_multiplier)

    def of(self, _chosen: npt.NDArray[np.intp], counts: npt.NDArray[np.int64]) -> Allocation:
        """Return the same with other counts."""
        return replace(self, counts=counts)

    def fitted(self, fine: int) -> Allocation:
        """Return the same on a grid that suits one of losses with so many points per doubling."""
        from scipy.fft import next_fast_len

        return replace(self, size=next_fast_len(min(_MOST_POINTS, _POINTS * fine), real=True))

    def bounded(self, bound: str) -> Allocation:
        """Return the same with another bound; what is rough stays rough."""
        return self if self.bound == "rough" else replace(self, bound=bound)

    def aimed(self, theta: float, loss: float) -> Allocation:
        """Return the same for a tilt of the composition, and the loss of an epoch that is the mean under it."""
        return replace(self, theta=theta, loss=loss)

    def masses(self, direction: str, edges: Array) -> tuple[Array, Array]:
        """Return the P-mass and the Q-mass (1, n) of each loss interval; as those of `Family`."""
        return self.law(direction).masses(edges)

    def reach(self, direction: str, low: float, high: float) -> tuple[Array, Array]:
        """Return losses (1, 1) beyond which P has at most about ndtr(-low) below and ndtr(-high) above."""
        return self.law(direction).reach(float(special.ndtr(-low)), float(special.ndtr(-high)))

    def thick(self, _direction: str) -> Array:
        """Return a loss (1, 1) where P is thick."""
        return np.zeros((1, 1))

    def law(self, direction: str) -> Law:
        """Return the losses of an epoch."""
        settings = (self.log_rare, self.theta, self.loss, self.size)
        return _law(self.batches, self.noise_multiplier, direction == "remove", self.bound, *settings)


Losses = Family | Allocation
"""Steps of one shape, computed together: `Family` has exact masses, `Allocation` bounds on them."""


@lru_cache(maxsize=8)
def _law(t: int, s: float, remove: bool, bound: str, log_rare: float, theta: float, loss: float, size: int) -> Law:
    quantile = -float(special.ndtri_exp(log_rare - math.log(2.0 if remove else 2.0 * t)))
    cap = math.exp(min(600.0, (quantile + (1.0 / s if remove else 0.0)) / s - 0.5 / s**2))
    # The mean over unlike steps may be a loss that an epoch never has: around such a sum there is no mass.
    loss = min(loss, quantile / s + 0.5 / s**2)
    middle = t * math.exp(loss if remove else -loss)
    cap = cap if remove else min(cap, FAR * t, _FARTHER * middle)
    lost, rare = 0.0, 0.0 if bound == "lower" else math.exp(log_rare)
    ratios, masses_q = [], []
    for low, high in ranges(t, s, cap):
        settings = {"lower": bound == "lower", "add": not remove, "last": high == cap}
        most = _STEEPEST / step(t, s, low, high, size, **settings)
        usual = [share * theta / middle for share in (_TILTS if bound != "rough" else _TILTS[-3:])]
        rates = {min(rate, _RANGE / high) if remove else -rate for rate in usual if rate <= most}
        found = [transformed(t, s, low, high, rate, size, **settings) for rate in rates]
        q = _bounded(found, bound, remove, low)
        beyond = min(one.beyond for one in found)
        if bound == "upper" and remove:
            lost += beyond * float(found[0].values[-1] + found[0].g) / t
        elif bound == "upper":
            q[-1] += beyond
        ratios.append(found[0].values / t)
        masses_q.append(q)
    ratio, q = np.concatenate(ratios), np.concatenate(masses_q)
    order = np.argsort(ratio if remove else -ratio, kind="stable")
    ratio, q = ratio[order], q[order]
    some = ratio > 0.0
    p = ratio * q
    if remove:
        if bound == "upper":
            in_p, in_q = masses(s, np.array([cap, np.inf]))
            lost += float(in_p[0] + (t - 1) * in_q[0])
        return _checked(cut(np.log(ratio[some]), p[some], q[some], lost, rare), bound)
    if bound == "upper":
        lost += float(q[~some].sum())
    return _checked(cut(-np.log(ratio[some]), q[some], p[some], lost, rare), bound)


def _checked(law: Law, bound: str) -> Law:
    """Return the law; refuse an upper bound that has lost mass, and one that is nothing at all."""
    if len(law.p) < 2 or (bound == "upper" and not float(law.p.sum()) + law.infinite >= 1.0 - 1e-9):
        raise PrivacyError("random allocation: float64 does not hold its privacy loss; take the 'rdp' accountant")
    return law


def _bounded(found: Sequence[TiltedSum], bound: str, remove: bool, least: float) -> Array:
    """Return masses with what the transform's error may be added or taken away, of the tilt that has least of it.

    Below `least` there are none.
    """
    steepest = max(abs(one.rate) for one in found) * found[0].g
    block = int(min(1024.0, max(1.0, 0.5 / max(steepest, 1e-9))))
    some = found[0].values >= least * (1.0 - 1e-9) - found[0].g
    size = len(found[0].sums)
    best, masses_q = np.full(size, np.inf), np.zeros(size)
    for one in found:
        margin = math.exp(steepest * block) * (math.sqrt(block) * one.error + (one.left if bound == "lower" else 0.0))
        with np.errstate(over="ignore"):
            here = one.plain(np.full(size, margin))
        # By blocks: a block is of one tilt, the one that is best at its last point.
        last = blocks(here if remove else here[::-1], block)[:, -1:]
        here = (last + np.zeros(block)).reshape(-1)[-size:]
        here = here if remove else here[::-1]
        better = here < best
        sums = np.where(some, one.sums, 0.0)
        if bound == "rough":
            sums = np.where(sums > 8.0 * one.error, sums, 0.0)
        else:
            sums = moved(sums if remove else sums[::-1], block, margin if bound == "upper" else -margin)
            sums = sums if remove else sums[::-1]
        # The exponents of the tilt are rounded before they cancel.
        slip = 2.0**-50 * (abs(one.log_total) + np.abs(one.rate * one.values))
        sums = sums * (1.0 + slip if bound == "upper" else np.maximum(1.0 - slip, 0.0))
        best, masses_q = np.where(better, here, best), np.where(better, one.plain(sums), masses_q)
    if not np.isfinite(best).all():
        raise PrivacyError("random allocation: float64 does not hold its privacy loss; take the 'rdp' accountant")
    masses_q[found[0].values < least * (1.0 - 1e-9) - (1.0 + block) * found[0].g] = 0.0  # whole blocks without any
    return masses_q


def blocks(values: Array, block: int) -> Array:
    """Return the values in rows of `block`; the first one begins with zeros where they do not fill all rows."""
    return np.concatenate([np.zeros(-len(values) % block), values]).reshape(-1, block)


def moved(sums: Array, block: int, margin: float) -> Array:
    """Return masses with `margin` more in the last point of each block; or so much less, from the last points on.

    An error of L2 norm e moves the mass above any point of a block by at most sqrt(block) e, and within the blocks
    above as much: the curve, a sum with weights that grow, is then covered.
    """
    found = blocks(np.maximum(sums, 0.0), block)
    if margin >= 0.0:
        found[:, -1] += margin
    else:
        from_last = np.cumsum(found[:, ::-1], axis=1)
        kept = np.maximum(from_last + margin, 0.0)
        found = np.diff(kept, axis=1, prepend=0.0)[:, ::-1]
    result: Array = found.reshape(-1)[-len(sums) :]
    return result


def cut(losses: Array, p: Array, q: Array, lost: float, rare: float) -> Law:
    """Return the law with the largest losses, of P-mass `rare` at most, moved to infinity.

    There the error of the transform is more than the mass, and the composition's tilt would make it everything.
    """
    sums = np.cumsum(p[::-1])
    last = len(p) - int(np.searchsorted(sums, rare, side="right"))
    return Law(losses[:last], p[:last], q[:last], lost + (float(sums[len(p) - last - 1]) if last < len(p) else 0.0))
