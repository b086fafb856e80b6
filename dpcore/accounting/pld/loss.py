"""The privacy loss of one step: the masses of P and of Q between two losses, in closed form.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from dpcore.accounting.phases import PoissonStep, Step
from dpcore.spec import special

Array = npt.NDArray[np.float64]


class Steps:
    """Steps computed together: a `Family`, or epochs (`dpcore.accounting.pld.allocation`)."""

    counts: npt.NDArray[np.int64]
    subset: bool

    def fitted(self, _fine: int) -> Self:
        """Return the same for a grid of `fine` points per doubling; itself if masses are exact, as below."""
        return self

    def bounded(self, _bound: str) -> Self:
        """Return the same with masses of that bound."""
        return self

    def aimed(self, _theta: float, _loss: float) -> Self:
        """Return the same for a tilt of the composition, and the loss of a step that is the mean under it."""
        return self

    def masses(self, direction: str, edges: Array) -> tuple[Array, Array]:
        """Return the P-mass and the Q-mass (steps, n) of each loss interval between the ascending `edges`."""
        raise NotImplementedError

    def thick(self, direction: str) -> Array:
        """Return per step (steps, 1) a loss with much P-mass near it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Family(Steps):
    """Steps of one shape, computed together: the mixture of each (steps, components), and `counts` (steps,).

    `subset` says whether the steps draw subsets of fixed size (then there is one component of weight 1).
    """

    weights: Array
    rates: Array
    sigmas: Array
    counts: npt.NDArray[np.int64]
    subset: bool

    def of(self, chosen: npt.NDArray[np.intp], counts: npt.NDArray[np.int64]) -> "Family":
        """Return some of the steps, with other counts."""
        return Family(self.weights[chosen], self.rates[chosen], self.sigmas[chosen], counts, self.subset)

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
        """Return per step (steps, 1) a loss with much P-mass near it."""
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
    result = []
    for (subset, _), members in groups.items():
        members.sort(key=lambda member: (member[0][0][2], member[0][0][1]))
        for start in range(0, len(members), size):
            chunk = members[start : start + size]
            table = np.array([parts for parts, _ in chunk], dtype=np.float64)
            counts = np.array([count for _, count in chunk], dtype=np.int64)
            result.append(Family(table[..., 0], table[..., 1], table[..., 2], counts, subset))
    return result


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
    masses: Array = np.where(right, above[:, :-1] - above[:, 1:], below[:, 1:] - below[:, :-1])
    return masses


def _remove_masses(edges: Array, rate: Array, sigma: Array) -> tuple[Array, Array]:
    z = _outcome_at(edges, rate, sigma)
    out = normal_masses(z / sigma)
    inside = normal_masses((z - 1.0) / sigma)
    return (1.0 - rate) * out + rate * inside, out


def _add_masses(edges: Array, rate: Array, sigma: Array) -> tuple[Array, Array]:
    p, q = _remove_masses(-edges[:, ::-1], rate, sigma)
    return q[:, ::-1], p[:, ::-1]


def center(family: Steps, direction: str, width: float) -> Array:
    """Return per step (steps, 1) a loss r with much P-mass such that P/Q = e^r on the losses within width/2 of r.

    The rare-event case needs it: nearly all of P lies within much less than a grid cell, and moving it by a part of a
    cell in every one of T steps would move the total by T parts of a cell.
    """
    if family.subset:
        return np.zeros((len(family.counts), 1))
    r = family.thick(direction)
    for _ in range(12):
        p, q = family.masses(direction, np.hstack([r - 0.5 * width, r + 0.5 * width]))
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = np.log(p) - np.log(q)
        r = np.where(np.isfinite(moved), np.clip(moved, r - 0.5 * width, r + 0.5 * width), r)
    return r


# A step's privacy loss on a grid: one distribution that is certainly worse, one that is certainly better.
#
# Only the P-masses p_k at losses l_k = o + k h are kept: delta(eps) = sum_k p_k (1 - e^(eps - l_k))_+ grows with p and
# with l, and so does the delta of a composition. Hence raising losses (or letting mass go to +infinity) is valid for an
# upper bound, lowering losses (or dropping mass) for a lower bound. Both lose too much in T steps; what keeps the error
# at second order is that delta is convex in e^-L = dQ/dP:
#
# **Upper: connect the dots** (Doroshenko et al. 2022). The masses (P, Q) of a < L <= b are split between the ends such
# that both stay: p_b = (P - e^a Q)/(1 - e^(a-b)), p_a = P - p_b. The curve becomes the chord, above the true convex
# one. Mass above the grid becomes +infinity, mass below rises to its lowest point.
#
# **Lower: merging.** Merging outcomes into a group is a post-processing, its loss is r = log(P/Q) of the
# group. Bins are groups of neighboring losses, their edges chosen such that r_k is nearly l_k (for a density that is
# locally exponential). To bring it there exactly, bin k takes a fraction of a neighbor on the other side of
# l_k. With X_k = |P_k - e^(l_k) Q_k| / |P_j - e^(l_k) Q_j|, j = k-1 if r_k > l_k and k+1 otherwise, bin k and X_k of
# bin j together have loss l_k. If w_k is the fraction of bin k that is not given away, w_k + sum over the receivers i
# of k of X_i w_i = 1: one tridiagonal system. Where X_k is too large the loss is lowered to the next grid point.
#
# The points near the thickest part of P are h apart, and farther out the distance doubles after every `fine` points:
# chords and bins of width d at distance x of it have an error relative to the effect of that mass of (d/x)^2/6 at most.
#
# Rounding: every mass here carries a relative error of some units in the last place, relative to its own tail of P.
# With eta >= (error of the curve at a grid point)/(P-mass above it), scaling P up by e^eta and all losses with it (L +
# eta) covers the error, since E_Q[(e^eta Lambda - a)_+] - E_Q[(Lambda - a)_+] >= (e^eta - 1) P(Lambda > a). In T steps
# that is a shift of epsilon by T eta and a factor e^(T eta) on delta; `compose` adds them.


Integers = npt.NDArray[np.int64]

_LEAST_P = 1e-300  # float64 loses digits below 2e-308, and ndtr returns 0 from 1e-310 on
_LEAST_Q = 1e-290
_LOST = 1e-309  # bounds the P-mass of a step that is lost that way
MOST_TAKEN = 0.4  # of a neighbor that a bin may take: keeps the tridiagonal system diagonally dominant


@dataclass(frozen=True)
class Masses:
    """P-masses `p` (steps, n), 0 or more, at losses offsets + points * h.

    `points` (n,) ascend and are shared by the steps; `offsets` (steps, 1) are the losses of point 0. `infinite`
    (steps,) is the P-mass at loss +infinity, and `counts` (steps,) say how often each step occurs.
    """

    points: Integers
    offsets: Array
    p: Array
    infinite: Array
    counts: Integers
    h: float

    @property
    def losses(self) -> Array:
        """Losses of the points, (steps, n) float64."""
        return self.offsets + self.points * self.h


def points(low: float, high: float, fine: int) -> Integers:
    """Return integers that cover [low, high]: neighbors up to about `fine` from 0, then ever farther apart."""

    def side(end: float) -> list[Integers]:
        blocks, start, width = [], 0, 1
        while start < end:
            count = max(1, min(fine, int(np.ceil((end - start) / width))))
            blocks.append(start + width * np.arange(1, count + 1, dtype=np.int64))
            start, width = start + count * width, 2 * width
        return blocks or [np.array([1], dtype=np.int64)]

    right, left = np.concatenate(side(high)), np.concatenate(side(-low))
    return np.concatenate([-left[::-1], np.zeros(1, np.int64), right])


def upper(family: Steps, direction: str, h: float, offsets: Array, grid: Integers) -> Masses:
    """Return masses whose curve, composed any number of times with itself and others, is never below the true one."""
    family, at = family.bounded("upper"), offsets + grid * h
    wall = np.full_like(offsets, np.inf)
    all_p, all_q = family.masses(direction, np.hstack([-wall, at, wall]))
    cell_p, cell_q = all_p[:, 1:-1], all_q[:, 1:-1]
    # If Q has no digits it counts as 0: all of the mass goes to the upper end, which is valid.
    cell_q = np.where(cell_q < _LEAST_Q, 0.0, cell_q)
    width = np.diff(grid) * h
    with np.errstate(over="ignore", invalid="ignore"):
        right = (cell_p - np.exp(at[:, :-1]) * cell_q) / -np.expm1(-width)
    # If e^l overflows, Q is 0, and 0 * inf is not a number: as above.
    right = np.clip(np.nan_to_num(right, nan=np.inf), 0.0, cell_p)
    p = np.zeros_like(at)
    p[:, 0] = all_p[:, 0]
    p[:, :-1] += cell_p - right
    p[:, 1:] += right
    return Masses(grid, offsets, p, all_p[:, -1] + _LOST, family.counts, h)


def lower(family: Steps, direction: str, h: float, offsets: Array, grid: Integers, above: Array) -> Masses:
    """Return masses whose curve, composed, is never above the true one; `above` are those of `upper`."""
    family, at = family.bounded("lower"), offsets + grid * h
    edges = _edges(above, grid, h, at)
    _balance(edges, family, direction, at, int(np.searchsorted(grid, 0)))
    bin_p, excess, share = _shares(family, direction, edges, at)
    for _ in range(2):
        lost = np.where(share <= MOST_TAKEN, 0.0, np.abs(excess))
        if not np.any(lost > 1e-5 * h):
            break
        _shrink(edges, family, direction, at, excess, np.argmax(lost, axis=1))
        bin_p, excess, share = _shares(family, direction, edges, at)
    usable = share <= MOST_TAKEN
    for _ in range(4):
        share = np.where(usable, share, 0.0)
        from_below = np.where(excess > 0.0, share, 0.0)
        from_above = np.where(excess > 0.0, 0.0, share)
        kept = kept_parts(from_below, from_above)
        bad = kept < 0.0
        if not bad.any():
            break
        usable[:, 1:] &= ~bad[:, :-1]
        usable[:, :-1] &= ~bad[:, 1:]
    else:
        usable = np.zeros_like(usable)
        from_below = from_above = np.zeros_like(at)
        kept = np.ones_like(at)
    whole = bin_p.copy()
    whole[:, 1:] += from_below[:, 1:] * bin_p[:, :-1]
    whole[:, :-1] += from_above[:, :-1] * bin_p[:, 1:]
    whole *= kept
    sinks = (excess < 0.0) & ~usable
    p = np.where(sinks, 0.0, whole)
    # A bin that reaches below the next lower point may not even have that loss. Masses too small to be known are
    # dropped.
    p[:, :-1] += np.where(sinks[:, 1:] & (edges[:, 1:-1] >= at[:, :-1]), whole[:, 1:], 0.0)
    p = np.where(p < _LEAST_P, 0.0, p)
    return Masses(grid, offsets, p, np.zeros(at.shape[0]), family.counts, h)


def _shares(family: Steps, direction: str, edges: Array, at: Array) -> tuple[Array, Array, Array]:
    """Return P and P - e^l Q of the bins, and the share X of a neighbor that each needs (infinity: not to be had)."""
    p, q = family.masses(direction, edges)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        lift = np.exp(at)
        excess = np.nan_to_num(p - lift * q, nan=-np.inf)
        lack = np.zeros_like(at)  # of the lower neighbor, at this bin's loss
        lack[:, 1:] = lift[:, 1:] * q[:, :-1] - p[:, :-1]
        surplus = np.zeros_like(at)  # of the upper neighbor
        surplus[:, :-1] = p[:, 1:] - lift[:, :-1] * q[:, 1:]
        share = np.abs(excess) / np.where(excess > 0.0, lack, surplus)
    share[excess == 0.0] = 0.0
    # If Q has no digits only the edges are known: the loss is lowered.
    unknown = (q < _LEAST_Q) & (p > 0.0)
    excess, share = np.where(unknown, -_LEAST_P, excess), np.where(unknown, np.inf, share)
    return p, excess, np.where(share >= 0.0, share, np.inf)


def _shrink(edges: Array, family: Steps, direction: str, at: Array, excess: Array, bins: Integers) -> None:
    """Move an edge of one bin of each step until its loss is right: the other bin there has neighbors to take from.

    Losses are bounded on one side, and a bin with much of the mass may have no neighbor there.
    """
    rows = np.arange(len(bins))
    high = excess[rows, bins] > 0.0  # its loss is too high: it gives its upper part away
    level = at[rows, bins][:, None]
    low_edge, high_edge = edges[rows, bins][:, None], edges[rows, bins + 1][:, None]
    lift, top = np.exp(np.minimum(level, 700.0)), high[:, None]
    near, far = level, np.where(top, high_edge, low_edge)
    for _ in range(16):
        middle = 0.5 * (near + far)
        p, q = family.masses(direction, np.hstack([np.where(top, low_edge, middle), np.where(top, middle, high_edge)]))
        wrong = np.where(top, p - lift * q > 0.0, p - lift * q < 0.0)
        near, far = np.where(wrong, near, middle), np.where(wrong, middle, far)
    moved = np.isfinite(near[:, 0])
    edges[rows, bins + 1] = np.where(high & moved, near[:, 0], edges[rows, bins + 1])
    edges[rows, bins] = np.where(~high & moved, near[:, 0], edges[rows, bins])


def _edges(above: Array, grid: Integers, h: float, at: Array) -> Array:
    """Return edges of bins whose loss log(P/Q) is nearly the grid point in them."""
    width = np.diff(grid) * h
    span = np.concatenate([width[:1], 0.5 * (width[:-1] + width[1:]), width[-1:]])
    with np.errstate(divide="ignore", invalid="ignore"):
        density = np.log(above) - np.log(span) - 0.5 * at  # of sqrt(PQ): e^-L averages like L under it
        slope = np.clip(np.nan_to_num(np.diff(density, axis=1)), -30.0, 30.0)
    slope = np.where(np.abs(slope) < 1e-3, 1e-3, slope)
    mean = -1.0 / np.expm1(-slope) - 1.0 / slope  # of the density e^(slope x) on [0, 1]
    inner = at[:, :-1] + width * (1.0 - mean)
    zero = int(np.searchsorted(grid, 0))
    inner[:, zero - 1] = at[:, zero] - 0.5 * h
    inner[:, zero] = at[:, zero] + 0.5 * h
    first = at[:, :1] - 0.5 * width[0]
    return np.hstack([first, inner, np.full_like(first, np.inf)])


def _balance(edges: Array, family: Steps, direction: str, at: Array, zero: int) -> None:
    """Move the outer edges of the bins next to bin 0 until these have the right loss, or miss it toward bin 0.

    If bin 0 has nearly all of P, the density next to it falls too fast for the edges found so far, and only bin 0 has
    the mass to correct that.
    """
    for side in (1, -1):
        k = zero + side
        if not 1 < k < at.shape[1] - 2:
            continue
        lift = np.exp(np.minimum(at[:, k : k + 1], 700.0))
        inner = edges[:, zero + (side > 0)][:, None]
        beyond = k + 2 if side > 0 else k - 1  # the outer edge of the next bin: all of that one may be needed
        outer = edges[:, beyond][:, None]

        def right(inner: Array, outer: Array, side: int = side, lift: Array = lift) -> npt.NDArray[np.bool_]:
            p, q = family.masses(direction, np.hstack([inner, outer][::side]))
            return side * (p - lift * q) >= 0.0

        near, far = at[:, k : k + 1], outer
        for _ in range(9):
            middle = 0.5 * (near + far)
            reached = right(inner, middle)
            near, far = np.where(reached, near, middle), np.where(reached, middle, far)
        edges[:, k + (side > 0)] = far[:, 0]
        if np.all(right(inner, far)):
            continue
        # Nothing to be had farther out: bin 0 takes the inner part.
        keeps, gives = inner, at[:, k : k + 1]
        for _ in range(9):
            middle = 0.5 * (keeps + gives)
            reached = right(middle, far)
            keeps, gives = np.where(reached, keeps, middle), np.where(reached, middle, gives)
        edges[:, zero + (side > 0)] = np.where(right(inner, far), inner, gives)[:, 0]


def kept_parts(from_below: Array, from_above: Array) -> Array:
    """Return the share that each bin keeps: the solution w of the tridiagonal system, all steps in one band matrix."""
    if not (from_below.any() or from_above.any()):
        return np.ones_like(from_below)
    from scipy.linalg import solve_banded

    band = np.ones((3, from_below.size))
    band[0] = from_below.ravel()  # row k - 1, column k: bin k takes from k - 1
    band[2] = from_above.ravel()  # row k + 1, column k
    solution: Array = solve_banded((1, 1), band, np.ones(from_below.size), check_finite=False)
    return solution.reshape(from_below.shape)
