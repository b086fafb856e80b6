"""The best strategies that are power series: Toeplitz by bands, buffered linear (BLT), those with a banded inverse.

Power series of as many coefficients as there are steps come first: quotients, their transposes, and shifted sums. Each
takes the time of a recurrence over the steps.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.kinds import BandedInverseToeplitz, root, summed
from dpcore.stages.strategies.workloads import Workload, error_of

_BLOCK, _TINY = 1 << 14, 1e-250


def series_of(workload: Workload) -> Matrix:
    """Return p_0, p_1, ... of the workload 1/p(x); refuses one that is not Toeplitz."""
    series = workload.series()
    if series is None:
        raise ArgumentError(
            f"workload={workload.name!r}: must be constant along its diagonals for a Toeplitz strategy; take a dense "
            "or a banded one"
        )
    return series


def divided(series: Matrix, by: Matrix) -> Matrix:
    """Return the series over another, as long as itself."""
    from scipy.signal import lfilter

    result, state = np.empty(len(series)), np.zeros(len(by) - 1)
    for first in range(0, len(series), _BLOCK):
        block = slice(first, first + _BLOCK)
        result[block], state = lfilter([1.0], by, series[block], zi=state)
        state[np.abs(state) < _TINY] = 0.0  # subnormal numbers take a hundred times as long
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
    return np.array([left[lag:] @ right[: len(left) - lag] for lag in range(count)])


# The best Toeplitz strategies for Toeplitz workloads: by bands, and buffered linear (BLT).
#
# With c(x) the series of C, and A the series 1/p(x), A C^{-1} is the series h = 1 / (p c), so its row t has the squared
# norm ``h_0^2 + ... + h_t^2`` and the squared mean error of n steps is ``E(c) = (1/n) sum_t (n - t) h_t^2``. An example
# that takes part at 0, b, ..., (k - 1) b moves the sums by the series ``s_t = sum_i c_{t - i b}``, of squared norm
# S(c). Minimize log E + log S, which does not change with the scale of c, so c_0 = 1. Its derivatives:
#
#     dE/dc_j = -(2/n) sum_t (n - t) h_t (h/c)_{t-j},      dS/dc_j = 2 sum_i s_{j + i b}.
#
# The last one takes the first pattern for the worst, which it is for a c that is positive and does not rise; whatever c
# is found, its error is computed with the sensitivity that holds for it (`dpcore.stages.strategies.sensitivity`).


Objective = Callable[[Matrix], tuple[float, Matrix]]


_COARSER, _SHORTEST = 4, 2048
_NEAR = 1e-8
"""Change of the objective that ends a search which began near the optimum."""


def square_root(series: Matrix, size: int) -> Matrix:
    """Return the first coefficients of ``p(x)^(-1/2)`` over the first one: of ``p f' = -p' f / 2``."""
    result = np.zeros(size)
    result[0] = 1.0
    degree = len(series) - 1
    for k in range(1, size):
        lags = np.arange(1, min(degree, k) + 1)
        result[k] = -(series[lags] * (k - lags / 2) @ result[k - lags]) / (k * series[0])
    return result


def toeplitz(workload: Workload, bands: int, epochs: int, period: int) -> Matrix:
    """Return c_0 .. c_{bands-1} of the least mean error if examples take part `epochs` times, `period` apart.

    For many steps, the search begins with the result for fewer: few bands hardly depend on the number of steps.
    """
    return _searched(series_of(workload), workload.steps, bands, epochs, period)


def _searched(series: Matrix, steps: int, bands: int, epochs: int, period: int) -> Matrix:
    from scipy.optimize import minimize

    start, ending = square_root(series, bands), 1e-13
    if bands == 1:
        return start
    short = epochs * (steps // _COARSER // epochs)
    if short >= max(_SHORTEST, 4 * epochs, 4 * bands):
        start, ending = _searched(series, short, bands, epochs, short // epochs), _NEAR
    options, within = {"maxiter": 500, "ftol": ending, "gtol": 1e-8}, [(0, None)] * (bands - 1)
    objective = _objective(series, steps, epochs, period)
    last: Any = minimize(objective, start[1:], jac=True, method="L-BFGS-B", bounds=within, options=options)
    return np.concatenate([[1.0], last.x])


def _objective(series: Matrix, steps: int, epochs: int, period: int) -> Objective:
    weights, prefix = np.arange(steps, 0, -1) / steps, divided(np.eye(1, steps)[0], series)

    def objective(free: Matrix) -> tuple[float, Matrix]:
        c = np.concatenate([[1.0], free])
        with np.errstate(all="ignore"):
            h = divided(prefix, c)
            error = float(weights @ h**2)
            if not np.isfinite(error):
                return 1e300, np.zeros_like(free)
            slope = -2 * lagged(weights * h, divided(h, c), len(c)) / error
        moved = summed(c, steps, epochs, period)
        square = float(moved @ moved)
        return np.log(error) + np.log(square), (slope + 2 * gathered(moved, len(c), epochs, period) / square)[1:]

    return objective


# The best buffered linear Toeplitz strategies: a few geometric sequences, whatever the number of steps.
#
# The series is ``c(x) = 1 + sum_j w_j x / (1 - u_j x)``; see `dpcore.stages.strategies.kinds` for its quotient P/Q.
# With h = 1 / (p c) as above, and g = h / c,
#
#     dh/dw_j = -g x / (1 - u_j x),      dh/du_j = -w_j g x^2 / (1 - u_j x)^2:
#
# recurrences of time T each. Minimized is the logarithm of squared error times squared sensitivity, over log w_j and
# the logits of u_j, from decays that are spread evenly between one step and all steps and the weights that fit the
# optimal series of many steps best, ``(1 - x)^(-1/2)``.


_FITTED, _SHORT, _BLT_TRIED, _BLT_ITERATIONS, _BLT_COARSER, _LOW = 2000, 10_000, 30, 400, 4, 1024


def blt(workload: Workload, buffers: int, epochs: int, period: int) -> tuple[Matrix, Matrix]:
    """Return scales and decays of the least mean error; participation as in `toeplitz`.

    Of many steps, they are found for fewer first: their logarithms and logits are smooth in the logarithm of the
    number, and are extrapolated.
    """
    series, sizes = series_of(workload), [workload.steps]
    while sizes[0] > _SHORT and sizes[0] // _BLT_COARSER >= 4 * epochs:
        sizes.insert(0, epochs * (sizes[0] // _BLT_COARSER // epochs))
    fits: list[Matrix] = []
    for size in sizes:
        objective = _blt_objective(series, buffers, size, epochs, period if size == workload.steps else size // epochs)
        if fits:
            start = np.clip(_extrapolated(fits), *_limits(buffers))
            fits.append(_least(objective, start, _BLT_ITERATIONS, _NEAR).x)
        else:
            starts = [_start(size, buffers, first, share) for first in (1.2, 2.0, 4.0) for share in (2.0, 0.5, 0.1)]
            # There are local minima: the best of several starts is followed to its end.
            tried = _BLT_TRIED if size <= _SHORT else 0
            begun = min((_least(objective, start, tried) for start in starts), key=lambda each: each.fun)
            fits.append(_least(objective, begun.x, _BLT_ITERATIONS).x)
    return np.exp(fits[-1][:buffers]), 1 / (1 + np.exp(-fits[-1][buffers:]))


def _least(objective: Objective, start: Matrix, iterations: int, ending: float = 1e-14) -> Any:
    from scipy.optimize import minimize

    within = np.transpose(_limits(len(start) // 2))
    options = {"maxiter": iterations, "ftol": ending, "gtol": 1e-9}
    return minimize(objective, start, jac=True, method="L-BFGS-B", bounds=within, options=options)


def _extrapolated(fits: list[Matrix]) -> Matrix:
    """Return the next element of a sequence, by the polynomial through its last three, or fewer."""
    if len(fits) < 3:
        return fits[-1] if len(fits) == 1 else 2 * fits[-1] - fits[-2]
    return 3 * fits[-1] - 3 * fits[-2] + fits[-3]


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
    """Return the numbers v_j with ``P = prod_j (1 - v_j x)``, ascending; they are between the decays."""
    # 1 + sum_j w_j / (z - u_j) is det(z - V) / det(z - diag(u)), with this V.
    square = np.diag(decays) - np.sqrt(np.multiply.outer(scales, scales))
    return np.asarray(np.linalg.eigvalsh(square), dtype=np.float64)


def _filtered(series: Matrix, over: Matrix, under: Matrix) -> Matrix:
    """Return the series times ``prod_j (1 - over_j x) / (1 - under_j x)``.

    One factor after the other: the coefficients of a product with several zeros near 1 would not separate them.
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
    wanted = root(-0.5, size)[1:]
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
# if c has no negative coefficient, as for all p_1, p_2, ... <= 0. It takes the first pattern for the worst; of the
# results, the one is kept whose error is the least with the sensitivity that holds for it.
#
# A family has one number. `fractional_root`: the first b coefficients of ``(1 - x)^gamma`` (gamma-BIFR, arXiv
# 2605.18379); gamma = 1/2 is the banded inverse square root. Two coefficients are ``1 - lambda x``: each row
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
    candidates = [fractional_root(workload, bands, epochs, period)]
    if bands == 1:
        return candidates[0]
    objective = _inverse_objective(series, steps, epochs, period)
    options = {"maxiter": _ITERATIONS, "maxfun": 2 * _ITERATIONS, "ftol": 1e-13, "gtol": 1e-9, "maxcor": 30}

    def least(start: Matrix, within: Any) -> Matrix:
        falls = -np.diff(np.log(np.cumsum(start)))
        reached: Any = minimize(objective, falls, jac=True, method="L-BFGS-B", bounds=within, options=options)
        candidates.append(_series(reached.x))
        return candidates[-1]

    signs = [(0, None)] * (bands - 1)
    short = epochs * (steps // _INVERSE_COARSER // epochs)
    if short >= max(_INVERSE_SHORTEST, 4 * bands, 4 * epochs):
        # So few coefficients hardly depend on the number of steps.
        options["ftol"] = _INVERSE_NEAR
        fewer = Workload(workload.inverse[:, :short], workload.name)
        start = banded_inverse(fewer, bands, epochs, short // epochs)
        least(start, None if epochs == 1 else signs)
        return _best(candidates, workload, epochs)
    negative = least(candidates[0], signs)
    if epochs == 1 or steps <= MOST_SIGNED:
        least(negative, None)
        if 2 < bands <= _FEW:
            least(np.pad(fractional_root(workload, 2, epochs, period), (0, bands - 2)), None)
    return _best(candidates, workload, epochs)


def _best(candidates: list[Matrix], workload: Workload, epochs: int) -> Matrix:
    steps = workload.steps
    return min(candidates, key=lambda p: error_of(BandedInverseToeplitz(tuple(p.tolist()), steps), workload, epochs))


def fractional_root(workload: Workload, bands: int, epochs: int, period: int) -> Matrix:
    """Return the first coefficients of (1 - x)^gamma of the least mean error.

    gamma is in [0, 1), as near to 1 as 1 / (16 steps). The search is over ``u = -log(1 - gamma)``, on a grid and then
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
