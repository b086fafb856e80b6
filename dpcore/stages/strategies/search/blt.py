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

from dpcore.spec.recurrence import response
from dpcore.stages.strategies.base import Matrix
from dpcore.stages.strategies.blt import polynomials
from dpcore.stages.strategies.search.series import gathered, series_of, summed
from dpcore.stages.strategies.search.toeplitz import square_root
from dpcore.stages.strategies.workload import Workload

_FITTED, _SHORT, _TRIED = 2000, 10_000, 30


def blt(workload: Workload, buffers: int, epochs: int, period: int) -> tuple[Matrix, Matrix]:
    """Return scales and decays of the least mean error; participation as in `toeplitz`."""
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    series, steps = series_of(workload), workload.steps
    weights, places = np.arange(steps, 0, -1) / steps, np.arange(steps - 1)
    prefix = response((1.0,), tuple(series), steps)

    def objective(free: Matrix) -> tuple[float, Matrix]:
        scales, decays = np.exp(free[:buffers]), 1 / (1 + np.exp(-free[buffers:]))
        p, q = polynomials(tuple(scales), tuple(decays))
        c = response(p, q, steps)
        with np.errstate(all="ignore"):
            h = lfilter(q, p, prefix)
            error, g = float(weights @ h**2), lfilter(q, p, h)
        moved = summed(c, steps, epochs, period)
        square, wanted = float(moved @ moved), gathered(moved, steps, epochs, period)[1:]
        if not np.isfinite(error) or not np.isfinite(g).all():
            return 1e300, np.zeros_like(free)
        slopes = np.zeros((2, buffers))
        for j, (scale, decay) in enumerate(zip(scales, decays, strict=True)):
            once = lfilter([0.0, 1.0], [1.0, -decay], g)
            twice = scale * lfilter([0.0, 1.0], [1.0, -decay], once)
            powers = np.exp(np.log(decay) * places)
            later = scale * places * powers / decay
            for k, (by_h, by_c) in enumerate(((once, powers), (twice, later))):
                slopes[k, j] = -2 * (weights * h) @ by_h / error + 2 * wanted @ by_c / square
        # By the chain rule: dw = w d(log w), du = u (1 - u) d(logit u).
        return np.log(error) + np.log(square), np.concatenate([slopes[0] * scales, slopes[1] * decays * (1 - decays)])

    def least(start: Matrix, iterations: int) -> Any:
        within = [(-40, 5)] * buffers + [(-15, 30)] * buffers
        options = {"maxiter": iterations, "ftol": 1e-14, "gtol": 1e-9}
        return minimize(objective, start, jac=True, method="L-BFGS-B", bounds=within, options=options)

    starts = [_start(steps, buffers, shortest, share) for shortest in (1.2, 2.0, 4.0) for share in (2.0, 0.5, 0.1)]
    # There are local minima: the best of several starts is followed to its end.
    begun = min((least(start, _TRIED if steps <= _SHORT else 0) for start in starts), key=lambda found: found.fun)
    found = least(begun.x, 400)
    return np.exp(found.x[:buffers]), 1 / (1 + np.exp(-found.x[buffers:]))


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
