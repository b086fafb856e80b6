"""The parameters under which Accelerated-DP-SRGD has the optimal rate."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.spec.validate import integer, open_unit, positive


class AcceleratedParameters(NamedTuple):
    """What Accelerated-DP-SRGD runs with: one pass of `steps` batches of `batch_size` examples."""

    batch_size: int
    steps: int
    beta: float
    max_grad_norm: float


def accelerated_srgd_parameters(
    dataset_size: int,
    dimension: int,
    lipschitz: float,
    smoothness: float,
    diameter: float,
    epsilon: float,
    delta: float,
) -> AcceleratedParameters:
    """Return the parameters of theorem 4.10, with the largest batches that it allows.

    Parameters
    ----------
    dataset_size : int
        n, at least 2.
    dimension : int
        d.
    lipschitz : float
        L: no example's gradient is longer.
    smoothness : float
        M: no example's gradient changes faster.
    diameter : float
        Of the constraint set, ||C||_2 in the paper.
    epsilon, delta : float
        The guarantee asked for. They bound the batch size here and nothing else.

    Returns
    -------
    AcceleratedParameters
        ``steps = floor(n / B)``; ``beta = M + (8 L + 16 M diam) n^(3/2) / (diam B^2)``, of which 1 / beta is the
        learning rate; and the clip norm ``4 L + 8 M diam`` of the differences. Examples beyond ``steps * B`` are not
        used.

    Raises
    ------
    ArgumentError
        If the dimension is so high that no batch size fulfills the theorem's condition.

    Notes
    -----
    Corrected here:

    - The theorem bounds B by an expression in which ``ln(2.5) / delta`` stands for ``ln(2.5 / delta)``, and which has
      the unit of M where it should have none. Both come from the condition of corollary 4.5, which is what is required:
      ``d <= (B beta epsilon)^2 / (128 M^2 log2(T)^3 ln(4 T / delta) ln(2.5 / delta))``.
    - The logarithm of T is that of the tree's depth, to base 2, and T >= 2 (lemma 4.3).
    - The printed noise is left out. It is loose, and vanishes at T = 1; the methods calibrate the tree exactly, by the
      nodes that one example touches.

    ``B <= sqrt(n)`` gives ``beta >= 16 M n / B >= 2 M T``, as claim 4.2 asks.

    References
    ----------
    DP-SRG (Choquette-Choo, Ganesh, Thakurta), theorem 4.10, corollary 4.5 and claim 4.2.
    """
    n, d = integer(2, dataset_size=dataset_size), integer(1, dimension=dimension)
    L, M = positive(lipschitz=lipschitz), positive(smoothness=smoothness)
    diam = positive(diameter=diameter)
    epsilon, delta = positive(epsilon=epsilon), open_unit(delta=delta)

    B = np.arange(1, math.isqrt(n) + 1, dtype=np.float64)
    T = n // B
    beta = M + (8 * L + 16 * M * diam) * n**1.5 / (diam * B**2)
    largest = (B * beta * epsilon) ** 2 / (128 * M**2 * np.log2(T) ** 3 * np.log(4 * T / delta) * np.log(2.5 / delta))
    allowed = np.flatnonzero(largest >= d)
    if not allowed.size:
        raise ArgumentError(
            f"dimension={dimension!r}: must be at most {int(largest.max())} under these constants, beyond which the "
            "theorem allows no batch size; a greater dataset_size or epsilon raises it"
        )
    best = allowed[-1]
    return AcceleratedParameters(int(B[best]), int(T[best]), float(beta[best]), 4 * L + 8 * M * diam)
