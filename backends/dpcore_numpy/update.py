"""The update stage: one step of a first-order optimizer, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.check import check_update
from dpcore.spec.ops import UpdateSettings

Floats = NDArray[Any]


@np.errstate(over="ignore", invalid="ignore")  # if training diverges, the parameters show it, as under other backends
def update(
    rule: str,
    parameter: Floats,
    direction: Floats,
    moments: Sequence[Floats],
    settings: UpdateSettings,
    step_number: int,
    square: Floats | None = None,
) -> None:
    """See `dpcore.spec.ops.Backend.update`."""
    check_update(rule, parameter, direction, moments, step_number, square)
    move(rule, parameter, direction, moments, settings, step_number, square)


def move(
    rule: str,
    parameter: Floats,
    direction: Floats,
    moments: Sequence[Floats],
    settings: UpdateSettings,
    step_number: int,
    square: Floats | None,
) -> None:
    """Update without checks: `step` checks all tensors at once."""
    learning_rate, weight_decay, beta1, beta2, *_ = settings
    x, g = parameter, direction
    if rule == "adamw":
        x *= 1 - learning_rate * weight_decay
    elif weight_decay and rule != "accelerated":
        g = g + weight_decay * x

    if rule == "sgd":
        x -= learning_rate * g
    elif rule in ("momentum", "nesterov"):
        (m,) = moments
        m *= beta1
        m += g
        x -= learning_rate * (m if rule == "momentum" else g + beta1 * m)
    elif rule == "accelerated":
        z, y = moments
        z -= learning_rate * g
        y[...] = x - learning_rate / settings.weight * g
        x[...] = (1 - settings.coupling) * y + settings.coupling * z
    elif rule == "adagrad":
        (v,) = moments
        v += g * g if square is None else square
        x -= learning_rate * _quotient(g, v.copy(), settings)
    else:
        m, v = moments
        m *= beta1
        m += (1 - beta1) * g
        v *= beta2
        term = g * g if square is None else square.copy()
        term *= 1 - beta2
        v += term
        corrected = np.divide(v, 1 - beta2**step_number, out=term)
        x -= _quotient(learning_rate / (1 - beta1**step_number) * m, corrected, settings)


def _quotient(numerator: Floats, u: Floats, settings: UpdateSettings) -> Floats:
    """Return numerator / (sqrt(max(u - bias, floor^2)) + eps), and 0 where that denominator is 0; overwrites `u`."""
    if settings.bias:
        u -= settings.bias
    # Reading the least element takes an eighth of the time of a pass that changes nothing.
    if not u.min(initial=np.inf) >= settings.floor**2:
        np.maximum(u, settings.floor**2, out=u)
    np.sqrt(u, out=u)
    u += settings.eps
    if u.dtype.type(settings.eps) > 0:
        return np.divide(numerator, u, out=u)
    result: Floats = np.divide(numerator, u, out=np.zeros_like(u), where=u != 0)
    return result
