"""Buffered linear Toeplitz strategies: dense matrices that stream with a few vectors.

With scales w_j and decays u_j, j = 1..m, the series of C is that of a sum of m geometric sequences,

    c_0 = 1,  c_k = sum_j w_j u_j^{k-1}:      c(x) = 1 + sum_j w_j x / (1 - u_j x) = P(x) / Q(x)

with ``Q = prod_j (1 - u_j x)`` and ``P = Q + sum_j w_j x prod_{i != j} (1 - u_i x)``, both with constant term 1. So the
noise N = C^{-1} Z solves ``P N = Q Z``: the recurrence with b the coefficients of Q, a those of P behind the 1, and m
state vectors, the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import ClassVar

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.spec import validate
from dpcore.spec.recurrence import response
from dpcore.stages.strategies import base
from dpcore.stages.strategies.toeplitz import Rational


@dataclass(frozen=True)
class BLT(Rational):
    """C of a buffered linear Toeplitz mechanism with m given buffers, scaled over `steps` rows.

    Parameters
    ----------
    scales : sequence of float
        w_1 .. w_m.
    decays : sequence of float
        u_1 .. u_m, each in [0, 1).
    steps : int
        Rows; the norm of the first column, by which C is divided, depends on their number.

    References
    ----------
    Dvijotham, McMahan, Pillutla, Steinke and Thakurta 2024, "Efficient and near-optimal noise generation for streaming
    differential privacy".
    """

    scales: tuple[float, ...]
    decays: tuple[float, ...]
    steps: int
    kind: ClassVar[str] = "blt"

    def __init__(self, scales: Sequence[float], decays: Sequence[float], steps: int) -> None:
        values = {"scales": base.finite_array(1, scales=scales), "decays": base.finite_array(1, decays=decays)}
        if len(values["scales"]) != len(values["decays"]):
            raise ArgumentError(
                f"len(decays)={len(values['decays'])}: must be {len(values['scales'])}, one for each of the scales"
            )
        for decay in values["decays"]:
            validate.decay(decays=float(decay))
        for name, array in values.items():
            object.__setattr__(self, name, tuple(array.tolist()))
        object.__setattr__(self, "steps", validate.integer(steps=steps, minimum=1))

    def ratio(self) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Return P, Q and the norm of c_0 .. c_{T-1}."""
        p, q = polynomials(self.scales, self.decays)
        return p, q, float(np.linalg.norm(response(p, q, self.steps)))


@lru_cache(maxsize=32)
def polynomials(scales: tuple[float, ...], decays: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return P and Q, coefficients of x^0 .. x^m."""
    factors = [np.array([1.0, -decay]) for decay in decays]
    q = reduce(np.convolve, factors, np.ones(1))
    p = q.copy()
    for j, scale in enumerate(scales):
        p[1:] += scale * reduce(np.convolve, factors[:j] + factors[j + 1 :], np.ones(1))
    return tuple(p.tolist()), tuple(q.tolist())
