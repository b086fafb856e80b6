"""The best buffered linear Toeplitz strategies: a few geometric sequences, whatever the number of steps.

The series is ``c(x) = 1 + sum_j w_j x / (1 - u_j x)``; see `dpcore.stages.strategies.blt` for its quotient P/Q. With
h = 1 / (p c) as in `dpcore.stages.strategies.search.toeplitz`, and g = h / c,

    dh/dw_j = -g x / (1 - u_j x),      dh/du_j = -w_j g x^2 / (1 - u_j x)^2:

recurrences of time T each. Minimized is the logarithm of squared error times squared sensitivity, over log w_j and the
logits of u_j, from decays that are spread evenly between one step and all steps and the weights that fit the optimal
series of many steps best, ``(1 - x)^(-1/2)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.search.descent import descent
from dpcore.stages.strategies.search.series import divided, gathered, series_of
from dpcore.stages.strategies.search.toeplitz import Objective, square_root
from dpcore.stages.strategies.toeplitz import summed
from dpcore.stages.strategies.workload import Workload

_FITTED, _SHORT, _TRIED, _ITERATIONS, _COARSER = 2000, 10_000, 30, 400, 4
_NEAR, _DIFFERENCE, _FLATTEST, _LOW = 1e-8, 1e-3, 1e-8, 1024


def blt(workload: Workload, buffers: int, epochs: int, period: int) -> tuple[Matrix, Matrix]:
    """Return scales and decays of the least mean error; participation as in `toeplitz`.

    Of many steps, they are found for fewer first: their logarithms and logits are smooth in the logarithm of the
    number, and are extrapolated.
    """
    series, sizes = series_of(workload), [workload.steps]
    while sizes[0] > _SHORT and sizes[0] // _COARSER >= 4 * epochs:
        sizes.insert(0, epochs * (sizes[0] // _COARSER // epochs))
    found: list[Matrix] = []
    metric = np.eye(2 * buffers)
    for size in sizes:
        objective = _objective(series, buffers, size, epochs, period if size == workload.steps else size // epochs)
        if found:
            start = np.clip(_extrapolated(found), *_limits(buffers))
            found.append(_near(objective, start, metric))
        else:
            starts = [_start(size, buffers, first, share) for first in (1.2, 2.0, 4.0) for share in (2.0, 0.5, 0.1)]
            # There are local minima: the best of several starts is followed to its end.
            tried = _TRIED if size <= _SHORT else 0
            begun = min((_least(objective, start, tried) for start in starts), key=lambda each: each.fun)
            found.append(_least(objective, begun.x, _ITERATIONS).x)
        if size <= 4 * _SHORT < workload.steps:
            metric = _metric(objective, found[-1])
    return np.exp(found[-1][:buffers]), 1 / (1 + np.exp(-found[-1][buffers:]))


def _least(objective: Objective, start: Matrix, iterations: int) -> Any:
    from scipy.optimize import minimize

    within = np.transpose(_limits(len(start) // 2))
    options = {"maxiter": iterations, "ftol": 1e-14, "gtol": 1e-9}
    return minimize(objective, start, jac=True, method="L-BFGS-B", bounds=within, options=options)


def _near(objective: Objective, start: Matrix, metric: Matrix) -> Matrix:
    """Return the least point from a start near it, by steps along the columns of `metric`."""
    limits, best, last = _limits(len(start) // 2), start, np.inf

    def moved(along: Matrix) -> tuple[float, Matrix]:
        value, slope = objective(np.clip(start + metric @ (along - 1), *limits))
        return value, slope @ metric

    for along, value in descent(moved, np.ones(len(start))):
        best = np.clip(start + metric @ (along - 1), *limits)
        if last - value < _NEAR:
            break
        last = value
    return best


def _metric(objective: Objective, point: Matrix) -> Matrix:
    """Return directions along which the second derivatives at a minimum are about 1, by central differences."""
    moves = _DIFFERENCE * np.eye(len(point))
    second = np.stack([objective(point + move)[1] - objective(point - move)[1] for move in moves]) / (2 * _DIFFERENCE)
    values, vectors = np.linalg.eigh((second + second.T) / 2)
    result: Matrix = vectors / np.sqrt(np.maximum(np.abs(values), _FLATTEST * np.abs(values).max()))
    return result


def _extrapolated(found: list[Matrix]) -> Matrix:
    """Return what follows in a sequence, by the polynomial through its last three, or fewer."""
    if len(found) < 3:
        return found[-1] if len(found) == 1 else 2 * found[-1] - found[-2]
    return 3 * found[-1] - 3 * found[-2] + found[-3]


def _limits(buffers: int) -> tuple[Matrix, Matrix]:
    return np.repeat([-40.0, -15.0], buffers), np.repeat([5.0, 30.0], buffers)


def _objective(series: Matrix, buffers: int, steps: int, epochs: int, period: int) -> Objective:
    from scipy.signal import lfilter

    weights, places = np.arange(steps, 0, -1) / steps, np.arange(steps - 1)
    prefix = divided(np.eye(1, steps)[0], series)

    def objective(free: Matrix) -> tuple[float, Matrix]:
        scales, decays = np.exp(free[:buffers]), 1 / (1 + np.exp(-free[buffers:]))
        poles, zeros = np.sort(decays), zeros_of(scales, decays)
        with np.errstate(all="ignore"):
            h = _filtered(prefix, poles, zeros)
            weighted = weights * h
            error, g = float(weighted @ h), _filtered(h, poles, zeros)
        if not np.isfinite(error) or not np.isfinite(g).all():
            return 1e300, np.zeros_like(free)
        powers = _powers(decays, steps - 1)
        moved = summed(np.append(1.0, scales @ powers), steps, epochs, period)
        square, wanted = float(moved @ moved), gathered(moved, steps, epochs, period)[1:]
        later, slopes = wanted * places, np.zeros((2, buffers))
        for j, (scale, decay) in enumerate(zip(scales, decays, strict=True)):
            once = lfilter([1.0], [1.0, -decay], g)
            twice = lfilter([1.0], [1.0, -decay], once)
            by_error = weighted[1:] @ once[:-1], scale * (weighted[2:] @ twice[:-2])
            by_square = wanted @ powers[j], scale * (later @ powers[j]) / decay
            slopes[:, j] = -2 * np.array(by_error) / error + 2 * np.array(by_square) / square
        # By the chain rule: dw = w d(log w), du = u (1 - u) d(logit u).
        return np.log(error) + np.log(square), np.concatenate([slopes[0] * scales, slopes[1] * decays * (1 - decays)])

    return objective


def _powers(decays: Matrix, size: int) -> Matrix:
    """Return ``decays^k`` for k below `size`, (m, size), as products of a high and a low power."""
    logarithms, count = np.log(decays)[:, None], -(-size // _LOW)
    high, low = np.exp(logarithms * (_LOW * np.arange(count))), np.exp(logarithms * np.arange(_LOW))
    result: Matrix = (high[:, :, None] * low[:, None, :]).reshape(len(decays), -1)[:, :size]
    return result


def zeros_of(scales: Matrix, decays: Matrix) -> Matrix:
    """Return the numbers v_j with ``P = prod_j (1 - v_j x)``, ascending; they lie between the decays."""
    # 1 + sum_j w_j / (z - u_j) is det(z - V) / det(z - diag(u)), with this V.
    square = np.diag(decays) - np.sqrt(np.multiply.outer(scales, scales))
    return np.asarray(np.linalg.eigvalsh(square), dtype=np.float64)


def _filtered(series: Matrix, over: Matrix, under: Matrix) -> Matrix:
    """Return the series times ``prod_j (1 - over_j x) / (1 - under_j x)``.

    One factor after the other: the coefficients of a product with several zeros near 1 would not tell them apart.
    """
    from scipy.signal import lfilter

    for zero, pole in zip(over, under, strict=True):
        series = lfilter([1.0, -zero], [1.0, -pole], series)
    return series


def _start(steps: int, buffers: int, shortest: float, share: float) -> Matrix:
    """Return logarithms of scales and logits of decays, of lengths from `shortest` to `share` of the steps."""
    from scipy.optimize import nnls

    longest = max(share * steps, 2 * shortest)
    lengths = np.geomspace(shortest, longest, buffers) if buffers > 1 else np.array([np.sqrt(shortest * longest)])
    decays = 1 - 1 / lengths
    size = min(steps, _FITTED)
    wanted = square_root(np.array([1.0, -1.0]), size)[1:]
    scales, _ = nnls(decays[None, :] ** np.arange(size - 1)[:, None], wanted) if size > 1 else (np.ones(buffers), 0.0)
    return np.concatenate([np.log(np.maximum(scales, 1e-4)), np.log(decays / (1 - decays))])
