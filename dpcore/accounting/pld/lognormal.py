"""The law of X = e^(z/s - 1/(2 s^2)), z standard normal, on a grid: once larger in the convex order, once smaller.

Of an interval of X, Q is its mass under z, and P = E[X; interval] its mass under z + 1/s, since E X = 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpcore.accounting.pld.discretize import MOST_TAKEN, kept_parts
from dpcore.accounting.pld.loss import normal_masses

Array = npt.NDArray[np.float64]


def masses(s: float, ends: Array) -> tuple[Array, Array]:
    """Return P and Q of the intervals between neighbors of `ends`, ascending, 0 and infinity allowed."""
    with np.errstate(divide="ignore"):
        z: Array = s * np.log(ends)[None] + 0.5 / s
    return normal_masses(z - 1.0 / s)[0], normal_masses(z)[0]


def split(s: float, g: float, points: int, low: float, high: float) -> Array:
    """Return Q-masses at 0, g, ..., points g of X in [low, high]: a cell's are split such that its P and Q stay."""
    at: Array = g * np.arange(points + 1, dtype=np.float64)
    p, q = masses(s, np.clip(at, low, high))
    right = np.clip((p - at[:-1] * q) / g, 0.0, q)
    mass = np.zeros(points + 1)
    mass[:-1] += q - right
    mass[1:] += right
    return mass


def bins(s: float, g: float, points: int) -> tuple[Array, Array]:
    """Return o, o + g, ..., and edges of bins around them whose means are nearly these; o is the mean of [0, g).

    A density that is e^(slope x) between two points has its edge where both sides have them as their means.
    """
    p, q = masses(s, np.array([0.0, g]))
    offset = float(p[0] / q[0]) if q[0] > 1e-290 else 0.5 * g
    at: Array = offset + g * np.arange(points + 1, dtype=np.float64)
    z = s * np.log(at)
    slope = np.clip(np.diff(-0.5 * z * z - 1.5 * np.log(at)), -30.0, 30.0)
    slope = np.where(np.abs(slope) < 1e-3, 1e-3, slope)
    mean = -1.0 / np.expm1(-slope) - 1.0 / slope
    edges = np.concatenate([[0.0], at[:-1] + g * (1.0 - mean), [at[-1] + 0.5 * g]])
    edges[1] = g
    return at, np.maximum.accumulate(edges)


def merged(s: float, at: Array, edges: Array, low: float, high: float, rising: bool) -> Array:
    """Return Q-masses at the points of X in [low, high]: bins, told apart no more, whose mean is moved to the point.

    A bin takes a fraction of a neighbor that lies on the other side of the point, as in `discretize.lower`. Where there
    is too little to take, its mass goes to the next point below its mean, or above it if `rising`.
    """
    ends = np.clip(edges, low, high)
    p, q = masses(s, ends)
    excess = p - at * q
    lack, surplus = np.zeros_like(at), np.zeros_like(at)
    lack[1:] = at[1:] * q[:-1] - p[:-1]  # of the lower neighbor
    surplus[:-1] = p[1:] - at[:-1] * q[1:]  # of the upper one
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.abs(excess) / np.where(excess > 0.0, lack, surplus)
    usable = (share >= 0.0) & (share <= MOST_TAKEN)
    below = np.where(usable & (excess > 0.0), share, 0.0)
    above = np.where(usable & (excess <= 0.0), share, 0.0)
    keeps = kept_parts(below[None], above[None])[0]
    if (keeps < 0.0).any():
        usable[:], below, above, keeps = False, np.zeros_like(at), np.zeros_like(at), np.ones_like(at)
    mass = q.copy()
    mass[1:] += below[1:] * q[:-1]
    mass[:-1] += above[:-1] * q[1:]
    mass *= keeps
    moved = np.where(~usable & ((excess > 0.0) if rising else (excess < 0.0)), mass, 0.0)
    # A bin that reaches beyond the next point may not even have that mean: it is left out.
    fits = ends[1:-1] <= at[1:] if rising else ends[1:-1] >= at[:-1]
    found: Array = mass - moved
    if rising:
        found[1:] += np.where(fits, moved[:-1], 0.0)
    else:
        found[:-1] += np.where(fits, moved[1:], 0.0)
    return found
