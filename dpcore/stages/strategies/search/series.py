"""The best strategies that are power series: Toeplitz by bands, buffered linear (BLT), those with a banded inverse.

Power series of as many coefficients as there are steps come first: quotients, their transposes, and shifted sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.toeplitz import BandedInverseToeplitz, reciprocal, root, summed
from dpcore.stages.strategies.workloads import Workload, error_of

MOST_FILTERED = 512
"""So many coefficients are divided by as a recurrence; more by Fourier transforms."""

_DIRECT, _BLOCK, _TINY = 64, 1 << 14, 1e-250


def series_of(workload: Workload) -> Matrix:
    """Return p_0, p_1, ... of the workload 1/p(x); refuses one that is not Toeplitz."""
    found = workload.series()
    if found is None:
        raise ArgumentError(
            f"workload={workload.name!r}: must be constant along its diagonals for a Toeplitz strategy; take a dense "
            "or a banded one"
        )
    return found


def divided(series: Matrix, by: Matrix) -> Matrix:
    """Return the series over another, as long as itself."""
    from scipy.signal import fftconvolve, lfilter

    if len(by) <= MOST_FILTERED:
        result, state = np.empty(len(series)), np.zeros(len(by) - 1)
        for first in range(0, len(series), _BLOCK):
            block = slice(first, first + _BLOCK)
            result[block], state = lfilter([1.0], by, series[block], zi=state)
            state[np.abs(state) < _TINY] = 0.0  # subnormal numbers take a hundred times as long
        return result
    whole: Matrix = fftconvolve(series, inverse(by, len(series)))[: len(series)]
    return whole


def inverse(series: Matrix, size: int) -> Matrix:
    """Return the first coefficients of 1 over the series, (size,)."""
    if len(series) <= MOST_FILTERED:
        return divided(np.eye(1, size)[0], series)
    return reciprocal(np.pad(series, (0, size - len(series))))


def multiplied(left: Matrix, right: Matrix) -> Matrix:
    """Return the product of two series, as long as the second."""
    from scipy.signal import fftconvolve, lfilter

    if len(left) <= _DIRECT:
        filtered: Matrix = lfilter(left, [1.0], right)
        return filtered
    result: Matrix = fftconvolve(left, right)[: len(right)]
    return result


def adjoint(values: Matrix, by: Matrix) -> Matrix:
    """Return ``sum_t values_t (1/by)_{t-j}`` for all j: the transpose of `divided`."""
    return divided(values[::-1], by)[::-1]


def gathered(moved: Matrix, size: int, epochs: int, period: int) -> Matrix:
    """Return ``sum_i s_{j + i period}`` for j below `size`."""
    result = np.zeros(size)
    for first in range(0, min(epochs * period, len(moved)), period):
        part = moved[first : first + size]
        result[: len(part)] += part
    return result


def lagged(left: Matrix, right: Matrix, count: int) -> Matrix:
    """Return ``sum_t left_t right_{t-j}`` for j below `count`."""
    from scipy.signal import fftconvolve

    size = len(left)
    if count <= _DIRECT:
        return np.array([left[lag:] @ right[: size - lag] for lag in range(count)])
    result: Matrix = fftconvolve(left, right[::-1])[size - 1 : size - 1 + count]
    return result


# Descent by L-BFGS on an open domain, such as that of positive definite matrices: SciPy's does not bear its edge.


_DECREASE, _SHORTEST_MOVE = 1e-4, 1e-12


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
            if length < _SHORTEST_MOVE:
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


# The best Toeplitz strategies for Toeplitz workloads: by bands, and buffered linear (BLT).
#
# With c(x) the series of C, and A the series 1/p(x), A C^{-1} is the series h = 1 / (p c), so its row t has the squared
# norm ``h_0^2 + ... + h_t^2`` and the squared mean error of n steps is ``E(c) = (1/n) sum_t (n - t) h_t^2``. An example
# that takes part at 0, b, ..., (k - 1) b moves the sums by the series ``s_t = sum_i c_{t - i b}``, of squared norm
# S(c). What is minimized is log E + log S, which does not change with the scale of c, so c_0 = 1. Its derivatives:
#
#     dE/dc_j = -(2/n) sum_t (n - t) h_t (h/c)_{t-j},      dS/dc_j = 2 sum_i s_{j + i b}.
#
# The last one takes the first pattern for the worst, which it is for a c that is positive and does not rise; whatever c
# is found, its error is computed with the sensitivity that holds for it (`dpcore.stages.strategies.sensitivity`).


Objective = Callable[[Matrix], tuple[float, Matrix]]


_DOUBLED = 512
_COARSER, _SHORTEST = 4, 2048
_NEAR, _SURE = 1e-8, 5e-7
"""Changes of the objective that end a search which began near the optimum, and let it stay at its start."""


def square_root(series: Matrix, size: int) -> Matrix:
    """Return the first coefficients of ``p(x)^(-1/2)`` over the first one: of ``p f' = -p' f / 2``."""
    result = np.zeros(min(size, _DOUBLED))
    result[0] = 1.0
    degree = len(series) - 1
    for k in range(1, len(result)):
        lags = np.arange(1, min(degree, k) + 1)
        result[k] = -(series[lags] * (k - lags / 2) @ result[k - lags]) / (k * series[0])
    while len(result) < size:  # Newton's f <- f (3 - p f^2) / 2 doubles those that are right
        length = min(2 * len(result), size)
        f = np.pad(result, (0, length - len(result)))
        result = 1.5 * f - multiplied(f, multiplied(series / series[0], multiplied(f, f))) / 2
    return result


def toeplitz(workload: Workload, bands: int, epochs: int, period: int) -> Matrix:
    """Return c_0 .. c_{bands-1} of the least mean error where examples take part `epochs` times, `period` apart.

    Of many steps, the search begins with what it finds for fewer: over the square root of the workload, the best
    series of prefix sums hardly depends on their number but for the scale of time.
    """
    return _searched(series_of(workload), workload.steps, bands, epochs, period)[0]


def _searched(series: Matrix, steps: int, bands: int, epochs: int, period: int) -> tuple[Matrix, float]:
    """Return the series, and by how much the search lowered the objective below that of its start."""
    from scipy.optimize import minimize

    start, ending = square_root(series, bands), 1e-13
    if bands == 1:
        return start, 0.0
    short = epochs * (steps // _COARSER // epochs)
    if short >= max(_SHORTEST, 4 * epochs) and (start > 0).all():
        few = bands if 4 * bands <= short else max(2, bands * short // steps)
        found, gain = _searched(series, short, few, epochs, short // epochs)
        start *= np.interp(np.linspace(0, few - 1, bands), np.arange(few), found / start[:few])
        if bands == steps and gain < _SURE:  # and this one would lower it by less
            return start, gain
        ending = _NEAR
    objective = _objective(series, steps, epochs, period)
    options, within = {"maxiter": 500, "ftol": ending, "gtol": 1e-8}, [(0, None)] * (bands - 1)
    last: Any = minimize(objective, start[1:], jac=True, method="L-BFGS-B", bounds=within, options=options)
    return np.concatenate([[1.0], last.x]), objective(start[1:])[0] - last.fun


def _objective(series: Matrix, steps: int, epochs: int, period: int) -> Objective:
    weights, prefix = np.arange(steps, 0, -1) / steps, divided(np.eye(1, steps)[0], series)

    def objective(free: Matrix) -> tuple[float, Matrix]:
        c = np.concatenate([[1.0], free])
        with np.errstate(all="ignore"):
            by_c = None if len(c) <= MOST_FILTERED else inverse(c, steps)
            h = divided(prefix, c) if by_c is None else divided(by_c, series)
            error = float(weights @ h**2)
            if not np.isfinite(error):
                return 1e300, np.zeros_like(free)
            again = divided(h, c) if by_c is None else multiplied(by_c, h)
            slope = -2 * lagged(weights * h, again, len(c)) / error
        moved = summed(c, steps, epochs, period)
        square = float(moved @ moved)
        return np.log(error) + np.log(square), (slope + 2 * gathered(moved, len(c), epochs, period) / square)[1:]

    return objective


# The best buffered linear Toeplitz strategies: a few geometric sequences, whatever the number of steps.
#
# The series is ``c(x) = 1 + sum_j w_j x / (1 - u_j x)``; see `dpcore.stages.strategies.toeplitz` for its quotient P/Q.
# With h = 1 / (p c) as above, and g = h / c,
#
#     dh/dw_j = -g x / (1 - u_j x),      dh/du_j = -w_j g x^2 / (1 - u_j x)^2:
#
# recurrences of time T each. Minimized is the logarithm of squared error times squared sensitivity, over log w_j and
# the logits of u_j, from decays that are spread evenly between one step and all steps and the weights that fit the
# optimal series of many steps best, ``(1 - x)^(-1/2)``.


_FITTED, _SHORT, _BLT_TRIED, _BLT_ITERATIONS, _BLT_COARSER = 2000, 10_000, 30, 400, 4
_BLT_NEAR, _DIFFERENCE, _FLATTEST, _LOW = 1e-8, 1e-3, 1e-8, 1024


def blt(workload: Workload, buffers: int, epochs: int, period: int) -> tuple[Matrix, Matrix]:
    """Return scales and decays of the least mean error; participation as in `toeplitz`.

    Of many steps, they are found for fewer first: their logarithms and logits are smooth in the logarithm of the
    number, and are extrapolated.
    """
    series, sizes = series_of(workload), [workload.steps]
    while sizes[0] > _SHORT and sizes[0] // _BLT_COARSER >= 4 * epochs:
        sizes.insert(0, epochs * (sizes[0] // _BLT_COARSER // epochs))
    found: list[Matrix] = []
    metric = np.eye(2 * buffers)
    for size in sizes:
        objective = _blt_objective(series, buffers, size, epochs, period if size == workload.steps else size // epochs)
        if found:
            start = np.clip(_extrapolated(found), *_limits(buffers))
            found.append(_near(objective, start, metric))
        else:
            starts = [_start(size, buffers, first, share) for first in (1.2, 2.0, 4.0) for share in (2.0, 0.5, 0.1)]
            # There are local minima: the best of several starts is followed to its end.
            tried = _BLT_TRIED if size <= _SHORT else 0
            begun = min((_least(objective, start, tried) for start in starts), key=lambda each: each.fun)
            found.append(_least(objective, begun.x, _BLT_ITERATIONS).x)
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
        if last - value < _BLT_NEAR:
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


def _blt_objective(series: Matrix, buffers: int, steps: int, epochs: int, period: int) -> Objective:
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


# The best strategies with a banded inverse: N_t = sum_j p_j Z_{t-j}, whose rows are drawn again and never stored.
#
# With p(x) the series of C^{-1}, b coefficients and p_0 = 1, and A the series 1/q(x), the series h = p / q has row t of
# A C^{-1}, as above. C is the series c = 1/p, which is dense. Of an example
# that takes part at 0, b, ..., (k - 1) b, with G the products of these columns of C, minimized is log E + log S with
#
#     E = (1/n) sum_t (n - t) h_t^2,                    dE/dp_j = (2/n) sum_t (n - t) h_t (1/q)_{t-j},
#     S = sum |G|,  w = (1/2) dS/dc,                    dS/dp_j = -2 sum_t w_t (c^2)_{t-j}.
#
# Sums over t are filters that run backward, so each derivative takes the time of the series themselves. S is exact
# where c has no negative coefficient, as for all p_1, p_2, ... <= 0; it takes the first pattern for the worst, and of
# what is found, that is kept whose error is the least with the sensitivity that holds for it.
#
# A family has one number. `fractional_root`: the first b coefficients of ``(1 - x)^gamma`` (gamma-BIFR, arXiv
# 2605.18379), of which gamma = 1/2 is the banded inverse square root. Two coefficients are ``1 - lambda x``: each row
# of noise takes back a share of the one before (lambda-CGD, arXiv 2601.22334, there with columns scaled to norm 1; here
# constant along the diagonals). p_1, p_2, ... are negative, and add up to more than -1.


MOST_SIGNED = 4096
"""Steps up to which coefficients of both signs are tried over epochs: their sensitivity looks at each pattern."""

_TRIED, _ITERATIONS, _FEW = 49, 1000, 32
_INVERSE_COARSER, _INVERSE_SHORTEST, _INVERSE_NEAR = 8, 4096, 1e-9


def banded_inverse(workload: Workload, bands: int, epochs: int, period: int) -> Matrix:
    """Return p_0 .. p_{bands-1} of the least mean error; participation as in `toeplitz`."""
    from scipy.optimize import minimize

    series, steps = series_of(workload), workload.steps
    found = [fractional_root(workload, bands, epochs, period)]
    if bands == 1:
        return found[0]
    objective = _inverse_objective(series, steps, epochs, period)
    options = {"maxiter": _ITERATIONS, "maxfun": 2 * _ITERATIONS, "ftol": 1e-13, "gtol": 1e-9, "maxcor": 30}

    def least(start: Matrix, within: Any) -> Matrix:
        falls = -np.diff(np.log(np.cumsum(start)))
        reached: Any = minimize(objective, falls, jac=True, method="L-BFGS-B", bounds=within, options=options)
        found.append(_series(reached.x))
        return found[-1]

    signs = [(0, None)] * (bands - 1)
    short = epochs * (steps // _INVERSE_COARSER // epochs)
    if short >= max(_INVERSE_SHORTEST, 4 * bands, 4 * epochs):
        # So few coefficients hardly depend on the number of steps.
        options["ftol"] = _INVERSE_NEAR
        fewer = Workload(workload.inverse[:, :short], workload.name)
        start = banded_inverse(fewer, bands, epochs, short // epochs)
        least(start, None if epochs == 1 else signs)
        return _best(found, workload, epochs)
    negative = least(found[0], signs)
    if epochs == 1 or steps <= MOST_SIGNED:
        least(negative, None)
        if 2 < bands <= _FEW:
            least(np.pad(fractional_root(workload, 2, epochs, period), (0, bands - 2)), None)
    return _best(found, workload, epochs)


def _best(found: list[Matrix], workload: Workload, epochs: int) -> Matrix:
    steps = workload.steps
    return min(found, key=lambda p: error_of(BandedInverseToeplitz(tuple(p.tolist()), steps), workload, epochs))


def fractional_root(workload: Workload, bands: int, epochs: int, period: int) -> Matrix:
    """Return the first coefficients of (1 - x)^gamma of the least mean error.

    gamma lies in [0, 1), as near to 1 as 1 / (16 steps). Searched is ``u = -log(1 - gamma)``, on a grid and then
    between the neighbors of its best.
    """
    from scipy.optimize import minimize_scalar

    series, steps = series_of(workload), workload.steps
    weights = np.arange(steps, 0, -1) / steps

    def objective(u: float) -> float:
        p = root(-np.expm1(-u), bands)
        moved = summed(divided(np.eye(1, steps)[0], p), steps, epochs, period)
        h = divided(np.pad(p, (0, steps - len(p))), series)
        return float(np.log(weights @ h**2) + np.log(moved @ moved))

    # gamma = 1/2 is one of them: none is worse than the banded inverse square root.
    tried = np.sort(np.append(np.linspace(0, np.log(16 * steps), _TRIED), np.log(2)))
    values = [objective(u) for u in tried]
    best = int(np.argmin(values))
    around = tried[max(best - 1, 0)], tried[min(best + 1, _TRIED)]
    found: Any = minimize_scalar(objective, bounds=around, method="bounded", options={"xatol": 1e-9})
    return root(float(-np.expm1(-(found.x if found.fun < values[best] else tried[best]))), bands)


def _inverse_objective(
    series: Matrix, steps: int, epochs: int, period: int
) -> Callable[[Matrix], tuple[float, Matrix]]:
    weights, one = np.arange(steps, 0, -1) / steps, np.eye(1, steps)[0]

    def objective(free: Matrix) -> tuple[float, Matrix]:
        with np.errstate(all="ignore"):
            p = _series(free)
            c, h = divided(one, p), divided(np.pad(p, (0, steps - len(p))), series)
            error, (square, wanted) = float(weights @ h**2), moves(c, epochs, period)
            if not np.isfinite(error * square):  # so far off that C overflows
                return 1e300, np.zeros_like(free)
            slope = 2 * adjoint(weights * h, series)[: len(p)] / error
            slope -= 2 * adjoint(adjoint(wanted, p), p)[: len(p)] / square
        # r_j = exp(-u_1 - ... - u_j), and p_j = r_j - r_{j-1}.
        by_partial = (slope - np.append(slope[1:], 0.0)) * np.cumsum(p)
        return float(np.log(error) + np.log(square)), -np.cumsum(by_partial[::-1])[::-1][1:]

    return objective


def _series(falls: Matrix) -> Matrix:
    """Return p_0, p_1, ... whose partial sums have these falls of their logarithms."""
    return np.diff(np.exp(-np.cumsum(np.concatenate([[0.0], falls]))), prepend=0.0)


def moves(c: Matrix, epochs: int, period: int) -> tuple[float, Matrix]:
    """Return ``sum |G|`` of the first pattern, and half its derivative by c, (steps,)."""
    steps = len(c)
    if epochs == 1 or steps > MOST_SIGNED or not (c < 0).any():
        moved = summed(c, steps, epochs, period)
        return float(moved @ moved), gathered(moved, steps, epochs, period)
    firsts = np.arange(0, steps, period)
    columns = np.stack([np.pad(c[: steps - first], (first, 0)) for first in firsts.tolist()])
    products = columns @ columns.T
    signed = np.sign(products) @ columns
    wanted = np.zeros(steps)
    for first, row in zip(firsts, signed, strict=True):
        wanted[: steps - first] += row[first:]
    return float(np.abs(products).sum()), wanted
