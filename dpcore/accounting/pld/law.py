"""Losses with their masses, and bounds on masses that a transform knows up to an error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


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
