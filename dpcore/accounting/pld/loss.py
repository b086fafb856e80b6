"""The privacy loss of one step: how much of P and of Q lies between two losses, in closed form.

A step is dominated by a pair (P, Q) of distributions of one number z. With loss L = log dP/dQ, the hockey-stick curve
is

    delta(eps) = E_Q[(e^L - e^eps)_+] = E_P[(1 - e^(eps - L))_+].

**Poisson sampling** with rate q and noise s. Let phi_c be N(c, s^2). "Remove": P = (1-q) phi_0 + q phi_1, Q = phi_0.
"Add": P and Q exchanged. Both have to be composed, every step in the same direction (Zhu, Dong, Wang 2022, Theorem 11;
Koskela, Jalkoe, Honkela 2020), and delta is the larger one. In "remove"

    L = log(1 - q + q e^((2z - 1)/(2 s^2)))   grows with z,   z(l) = 1/2 + s^2 log(1 + expm1(l)/q),

so the masses of a loss interval are differences of normal distribution functions; no loss lies below log(1-q). "Add" is
the same cells mirrored, with P and Q exchanged. In an openly drawn mixture the masses are the weighted sums of the
components'; the rest of the weight is an atom at loss 0.

**Subsets of fixed size**, replace-one, q = batch/data set: the curve that is certified is that of Zhu, Dong, Wang 2022
(on sampling without replacement; it goes back to Balle, Barthe, Gaboardi 2018): delta(log a) is that of "remove" for
a >= 1, and that of "add" for a < 1. Both curves agree at a = 1, where the slope jumps from -Q_add(L > 0) to
-Q_remove(L > 0): losses above 0 follow "remove", those below 0 "add", and the jump is an atom at 0 of P- and Q-mass
(1-q) erf(1/(2 sqrt 2 s)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dpcore.accounting.phases import PoissonStep, Step
from dpcore.spec import special

if TYPE_CHECKING:
    from dpcore.accounting.pld.allocation import Losses

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Family:
    """Steps of one shape, computed together: the mixture of each (steps, components), and `counts` (steps,).

    `subset` says whether the steps draw subsets of fixed size (then there is one component of weight 1).
    """

    weights: Array
    rates: Array
    sigmas: Array
    counts: npt.NDArray[np.int64]
    subset: bool

    def of(self, chosen: npt.NDArray[np.intp], counts: npt.NDArray[np.int64]) -> Family:
        """Return some of the steps, with other counts."""
        return Family(self.weights[chosen], self.rates[chosen], self.sigmas[chosen], counts, self.subset)

    def fitted(self, _fine: int) -> Family:
        """Return itself: the masses are exact on every grid."""
        return self

    def bounded(self, _bound: str) -> Family:
        """Return itself, likewise."""
        return self

    def aimed(self, _theta: float, _loss: float) -> Family:
        """Return itself, likewise."""
        return self

    def masses(self, direction: str, edges: Array) -> tuple[Array, Array]:
        """Return the P-mass and the Q-mass (steps, n) of each loss interval.

        `edges` (steps, n + 1) are ascending losses, infinities allowed; an atom at 0 counts to the interval that begins
        at or contains 0. `direction` is "remove" or "add", and ignored for subsets, whose pair is symmetric.
        """
        if self.subset:
            rate, sigma = self.rates, self.sigmas
            p, q = _remove_masses(np.maximum(edges, 0.0), rate, sigma)
            below_p, below_q = _add_masses(np.minimum(edges, 0.0), rate, sigma)
            atom = (1.0 - rate) * special.erf(0.5 / (np.sqrt(2.0) * sigma))
            p, q = p + below_p, q + below_q
        else:
            one = _remove_masses if direction == "remove" else _add_masses
            p = np.zeros((edges.shape[0], edges.shape[1] - 1))
            q = np.zeros_like(p)
            for k in range(self.weights.shape[1]):
                weight = self.weights[:, k : k + 1]
                more_p, more_q = one(edges, self.rates[:, k : k + 1], self.sigmas[:, k : k + 1])
                p, q = p + weight * more_p, q + weight * more_q
            atom = np.maximum(0.0, 1.0 - self.weights.sum(axis=1, keepdims=True))
        if np.any(atom > 0.0):
            zero = atom * ((edges[:, :-1] <= 0.0) & (edges[:, 1:] > 0.0))
            p, q = p + zero, q + zero
        return p, q

    def reach(self, direction: str, low: float, high: float) -> tuple[Array, Array]:
        """Return losses (steps, 1) beyond which P has at most about ndtr(-low) below and ndtr(-high) above."""
        rate, sigma = self.rates, self.sigmas
        if self.subset:
            top = loss_at(1.0 + high * sigma, rate, sigma)
            return -loss_at(1.0 + low * sigma, rate, sigma), np.maximum(top, 0.0)
        if direction == "remove":
            ends = loss_at(-low * sigma, rate, sigma), loss_at(1.0 + high * sigma, rate, sigma)
        else:
            ends = -loss_at(low * sigma, rate, sigma), -loss_at(-high * sigma, rate, sigma)
        return ends[0].min(axis=1, keepdims=True), ends[1].max(axis=1, keepdims=True)

    def thick(self, direction: str) -> Array:
        """Return per step (steps, 1) a loss where P is thick."""
        steps = np.arange(self.weights.shape[0])
        if self.subset:
            return np.zeros((len(steps), 1))
        main = np.argmax(self.weights, axis=1)
        rate, sigma = self.rates[steps, main][:, None], self.sigmas[steps, main][:, None]
        if direction == "remove":
            r = loss_at(np.where(rate > 0.5, 1.0, 0.0), rate, sigma)
        else:
            r = -loss_at(np.where(rate > 0.5, 0.5, 0.0), rate, sigma)
        idle = (1.0 - self.weights.sum(axis=1, keepdims=True)) > self.weights.max(axis=1, keepdims=True)
        return np.where(idle, 0.0, r)


def families(steps: Sequence[tuple[Step, int]], size: int = 256) -> list[Family]:
    """Return the steps sorted into families of at most `size`, those of like rate and noise together."""
    groups: dict[tuple[bool, int], list[tuple[tuple[tuple[float, float, float], ...], int]]] = {}
    for step, count in steps:
        if parts := step.components:
            groups.setdefault((not isinstance(step, PoissonStep), len(parts)), []).append((parts, count))
    found = []
    for (subset, _), members in groups.items():
        members.sort(key=lambda member: (member[0][0][2], member[0][0][1]))
        for start in range(0, len(members), size):
            chunk = members[start : start + size]
            table = np.array([parts for parts, _ in chunk], dtype=np.float64)
            counts = np.array([count for _, count in chunk], dtype=np.int64)
            found.append(Family(table[..., 0], table[..., 1], table[..., 2], counts, subset))
    return found


def joined(parts: Sequence[Family]) -> list[Family]:
    """Return the families with those of one shape put together."""
    groups: dict[tuple[bool, int], list[Family]] = {}
    for part in parts:
        groups.setdefault((part.subset, part.weights.shape[1]), []).append(part)
    arrays = ("weights", "rates", "sigmas", "counts")
    return [
        Family(**{name: np.concatenate([getattr(one, name) for one in group]) for name in arrays}, subset=subset)
        for (subset, _), group in groups.items()
    ]


def loss_at(z: Array, rate: Array, sigma: Array) -> Array:
    """Return the loss of "remove" at outcome z."""
    exponent = (z - 0.5) / sigma**2
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        small = np.log1p(rate * np.expm1(np.minimum(exponent, 30.0)))
        large = exponent + np.log(rate) + np.log1p((1.0 - rate) / rate * np.exp(-np.maximum(exponent, 30.0)))
    return np.where(rate == 1.0, exponent, np.where(exponent > 30.0, large, small))


def _outcome_at(loss: Array, rate: Array, sigma: Array) -> Array:
    """Return the outcome z at which "remove" has the loss; -inf below all losses.

    Its rounding hardly matters: P(z > t) - a Q(z > t) is largest at t = z(log a), so an error counts squared.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(loss, 30.0)) / rate, -1.0))
        large = loss - np.log(rate)
    exponent = np.where(rate == 1.0, loss, np.where(loss > 30.0, large, small))
    return 0.5 + sigma**2 * exponent


def normal_masses(edges: Array) -> Array:
    """Return the standard normal mass between neighbors, each difference taken in the nearer tail."""
    below, above = special.ndtr(edges), special.ndtr(-edges)
    right = edges[:, :-1] > 0.0
    found: Array = np.where(right, above[:, :-1] - above[:, 1:], below[:, 1:] - below[:, :-1])
    return found


def _remove_masses(edges: Array, rate: Array, sigma: Array) -> tuple[Array, Array]:
    z = _outcome_at(edges, rate, sigma)
    out = normal_masses(z / sigma)
    inside = normal_masses((z - 1.0) / sigma)
    return (1.0 - rate) * out + rate * inside, out


def _add_masses(edges: Array, rate: Array, sigma: Array) -> tuple[Array, Array]:
    p, q = _remove_masses(-edges[:, ::-1], rate, sigma)
    return q[:, ::-1], p[:, ::-1]


def center(family: Losses, direction: str, width: float) -> Array:
    """Return per step (steps, 1) a loss r such that P/Q = e^r on the losses within width/2 of r, where P is thick.

    The rare-event case needs it: nearly all of P lies within much less than a grid cell, and moving it by a part of a
    cell in every one of T steps would move the total by T parts of a cell.
    """
    if family.subset:
        return np.zeros((family.weights.shape[0], 1))
    r = family.thick(direction)
    for _ in range(12):
        p, q = family.masses(direction, np.hstack([r - 0.5 * width, r + 0.5 * width]))
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = np.log(p) - np.log(q)
        r = np.where(np.isfinite(moved), np.clip(moved, r - 0.5 * width, r + 0.5 * width), r)
    return r
