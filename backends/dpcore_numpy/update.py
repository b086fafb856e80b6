"""The update stage: one step of a first-order optimizer, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.check import check_update
from dpcore.spec.ops import UpdateSettings

Floats = NDArray[Any]


def update(
    rule: str,
    parameter: Floats,
    direction: Floats,
    moments: Sequence[Floats],
    settings: UpdateSettings,
    step_number: int,
) -> None:
    """See `dpcore.spec.ops.Backend.update`."""
    check_update(rule, parameter, direction, moments, step_number)
    learning_rate, weight_decay, beta1, beta2, eps = settings
    x, g = parameter, direction
    if rule == "adamw":
        x *= 1 - learning_rate * weight_decay
    elif weight_decay:
        g = g + weight_decay * x

    if rule == "sgd":
        x -= learning_rate * g
    elif rule == "momentum":
        (m,) = moments
        m *= beta1
        m += g
        x -= learning_rate * m
    else:
        m, v = moments
        m *= beta1
        m += (1 - beta1) * g
        v *= beta2
        term = g * g
        term *= 1 - beta2
        v += term
        denominator = np.divide(v, 1 - beta2**step_number, out=term)
        np.sqrt(denominator, out=denominator)
        denominator += eps
        move = learning_rate / (1 - beta1**step_number) * m
        move /= denominator
        x -= move
