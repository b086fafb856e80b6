"""Descent by L-BFGS on an open domain, such as that of positive definite matrices: SciPy's does not bear its edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from dpcore.stages.strategies.base import Matrix

_DECREASE, _SHORTEST = 1e-4, 1e-12


def descent(
    objective: Callable[[Matrix], tuple[float, Matrix]], start: Matrix, memory: int = 20
) -> Iterator[tuple[Matrix, float]]:
    """Yield points of falling value, until no step along the direction lowers it.

    `objective` returns value and gradient, an infinite value outside of the domain.

    References
    ----------
    Nocedal and Wright, "Numerical Optimization", algorithm 7.4.
    """
    point = start
    value, slope = objective(point)
    moves: list[Matrix] = []
    turns: list[Matrix] = []
    products: list[float] = []
    while True:
        direction = -_times_inverse_hessian(slope, moves, turns, products)
        fall = _inner(direction, slope)
        if fall >= 0:
            direction, fall = -slope, -_inner(slope, slope)
            moves, turns, products = [], [], []
        length = 1.0 if moves else min(1.0, 0.1 * np.abs(point).max() / max(np.abs(slope).max(), 1e-300))
        while True:
            new = point + length * direction
            new_value, new_slope = objective(new)
            if new_value <= value + _DECREASE * length * fall:
                break
            length /= 2
            if length < _SHORTEST:
                return
        move, turn = new - point, new_slope - slope
        product = _inner(move, turn)
        if product > 0:
            products = [*products, product][-memory:]
            moves, turns = [*moves, move][-memory:], [*turns, turn][-memory:]
        point, value, slope = new, new_value, new_slope
        yield point, value


def _times_inverse_hessian(slope: Matrix, moves: list[Matrix], turns: list[Matrix], products: list[float]) -> Matrix:
    """Return the two-loop recursion's result; `products` are those of moves and turns."""
    from scipy.linalg.blas import daxpy

    result, weights = slope.flatten(), []
    for move, turn, product in zip(reversed(moves), reversed(turns), reversed(products), strict=True):
        weights.append(_inner(move, result) / product)
        daxpy(turn.ravel(), result, a=-weights[-1])  # in place
    if moves:
        result *= products[-1] / _inner(turns[-1], turns[-1])
    for move, turn, product, weight in zip(moves, turns, products, reversed(weights), strict=True):
        daxpy(move.ravel(), result, a=weight - _inner(turn, result) / product)
    return result.reshape(slope.shape)


def _inner(left: Matrix, right: Matrix) -> float:
    from scipy.linalg.blas import ddot

    return float(ddot(left.ravel(), right.ravel()))
