"""The linear recurrence of filters and strategies, and their ring, in float64: for theory and checks.

``y_t = b_0 x_t + ... + b_nb x_{t-nb} - a_1 y_{t-1} - ... - a_na y_{t-na}``, and the output is y_t over the normalizer
(`dpcore.spec.ops.Backend.recurrence`). Backends have their own.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.check import order_of
from dpcore.spec.ops import Correlation, FilterCoefficients

Floats = NDArray[np.float64]


def advance(x: Floats, state: list[Any], filters: Sequence[FilterCoefficients], *, divide: bool = True) -> Floats:
    """Return the output of one step of recurrences in a row, in transposed direct form II.

    `state` has the vectors of all recurrences, changed in place, zeros before the first step. Coefficients may change
    from step to step, their lengths may not. Without `divide` the outputs are not divided by the normalizers.
    """
    done = 0
    for coefficients in filters:
        b, a, normalizer = coefficients
        order = order_of(coefficients)
        s = [*state[done : done + order], np.zeros_like(x)]
        y = b[0] * x + s[0]
        for k in range(1, order + 1):
            forward = b[k] * x if k < len(b) else 0.0
            back = a[k - 1] * y if k <= len(a) else 0.0
            state[done + k - 1] = forward - back + s[k]
        x = y / normalizer if divide else y
        done += order
    return x


def correlated(z: Floats, state: list[Any], coefficients: Correlation) -> Floats:
    """Return the noise of one step from its seed noise, by a recurrence or from a ring; `state` changes in place."""
    if isinstance(coefficients, FilterCoefficients):
        return advance(z, state, [coefficients])
    weights, place, normalizer, keeps = coefficients
    n: Floats = (z + sum(w * state[(place - j) % len(weights)] for j, w in enumerate(weights, 1))) / normalizer
    if weights:
        state[place] = n if keeps == "output" else z
    return n


@lru_cache(maxsize=256)
def response(b: tuple[float, ...], a: tuple[float, ...], size: int, *, to_ones: bool = False) -> Floats:
    """Return the first outputs, undivided, to a 1 followed by zeros, or to ones: (size,) float64, read-only.

    Constant coefficients, `a` with its a_0. To an impulse it is the power series of b(x) / a(x).
    """
    from scipy.signal import lfilter  # most of dpcore's import time, were it at the top

    inputs = np.ones(max(size, 1))  # lfilter takes no empty arrays
    inputs[1:] = to_ones
    result: Floats = np.asarray(lfilter(b, a, inputs), dtype=np.float64)[:size]
    result.flags.writeable = False
    return result
