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
    while True:
        direction = -_times_inverse_hessian(slope, moves, turns)
        fall = _inner(direction, slope)
        if fall >= 0:
            direction, fall = -slope, -_inner(slope, slope)
            moves, turns = [], []
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
        if _inner(move, turn) > 0:
            moves, turns = [*moves, move][-memory:], [*turns, turn][-memory:]
        point, value, slope = new, new_value, new_slope
        yield point, value


def _times_inverse_hessian(slope: Matrix, moves: list[Matrix], turns: list[Matrix]) -> Matrix:
    result, weights = slope.copy(), []
    for move, turn in zip(reversed(moves), reversed(turns), strict=True):
        weight = _inner(move, result) / _inner(move, turn)
        weights.append(weight)
        result -= weight * turn
    if moves:
        result *= _inner(moves[-1], turns[-1]) / _inner(turns[-1], turns[-1])
    for move, turn, weight in zip(moves, turns, reversed(weights), strict=True):
        again = _inner(turn, result) / _inner(move, turn)
        result += (weight - again) * move
    return result


def _inner(left: Matrix, right: Matrix) -> float:
    return float(np.einsum("i,i->", left.ravel(), right.ravel()))
