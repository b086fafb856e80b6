"""The update stage: one step of a first-order optimizer, in place."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton.language as tl

from dpcore.spec.check import check_update
from dpcore.spec.ops import SECOND_MOMENT, UPDATE_RULES, UpdateSettings
from dpcore_triton.arrays import written_back
from dpcore_triton.filter import loaded, pointers, store
from dpcore_triton.launch import (
    ELEMENTS,
    common_device,
    current_stream,
    float32_only,
    jit,
    kernel,
    launch,
    numbers,
    table,
)

UPDATE_NUMBERS = tl.constexpr(14)
# 2^-63, the root of the smallest normal number, is two ulps of the least; the fast quotient's divisor ends at 2^126.
FAST_EPS = (2.0**-41, 2.0**100)


def update(
    rule: str,
    parameter: torch.Tensor,
    direction: torch.Tensor,
    moments: Sequence[torch.Tensor],
    settings: UpdateSettings,
    step_number: int,
    square: torch.Tensor | None = None,
) -> None:
    """See `dpcore.spec.ops.Backend.update`."""
    check_update(rule, parameter, direction, moments, step_number, square)
    float32_only(parameter=[parameter])
    read = [array.detach().contiguous() for array in (direction, square) if array is not None]
    device = common_device(parameter=[parameter], direction=[direction], moments=moments, square=read[1:])
    with written_back(parameter, *moments) as lent:
        addresses = [tensor.data_ptr() for tensor in (*lent, *read)]
        size = parameter.numel()
        rows, _, programs = table([(size, *addresses)], [-(-size // ELEMENTS)], device)
        derived = numbers(update_numbers(rule, settings, step_number), device, current_stream(device))
        kind: dict[str, Any] = {"RULE": rule, "MOMENTS": UPDATE_RULES[rule], "SQUARE": square is not None}
        general = needs_general_denominator(rule, [settings])
        launch(_update_kernel, (programs,), device, rows, derived, **kind, GENERAL=general, ELEMENTS=ELEMENTS)


def update_numbers(rule: str, settings: UpdateSettings, step_number: int) -> tuple[float, ...]:
    """Return the numbers that kernels take for one group of settings, derived in float64."""
    learning_rate, weight_decay, beta1, beta2, eps, bias, floor, weight, coupling = settings
    unbias1, unbias2 = 1.0, 1.0
    if rule in ("adam", "adamw"):
        unbias1, unbias2 = 1 - beta1**step_number, 1 - beta2**step_number
    rate, keep = learning_rate / unbias1, 1 - learning_rate * weight_decay
    averages = (beta1, 1 - beta1, beta2, 1 - beta2, 1 / unbias2)
    return rate, keep, weight_decay, *averages, eps, bias, floor**2, learning_rate / weight, coupling, 1 - coupling


def needs_general_denominator(rule: str, settings: Iterable[UpdateSettings]) -> bool:
    """Return whether a denominator has a bias or a floor, or an eps at which its root must be exact."""
    least, most = FAST_EPS
    return rule in SECOND_MOMENT and any(s.bias or s.floor or not least <= s.eps <= most for s in settings)


@kernel()
def _update_kernel(
    row, derived, RULE: tl.constexpr, MOMENTS: tl.constexpr, SQUARE: tl.constexpr, GENERAL: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = i < tl.load(row + 1)
    (parameter,) = pointers(row, i, 2, 1)
    moments, read = pointers(row, i, 3, MOMENTS), pointers(row, i, 3 + MOMENTS, 1 + SQUARE)
    x = tl.load(parameter, mask=mask, other=0.0)
    g = tl.load(read[0], mask=mask, other=0.0)
    square = None
    if SQUARE:
        square = tl.load(read[1], mask=mask, other=0.0)
    moved = update_elements(RULE, x, g, square, loaded(moments, mask), settings_of(derived), GENERAL)
    tl.store(parameter, moved[0], mask=mask)
    store(moments, moved[1:], mask)


@jit
def settings_of(derived):
    """Return the numbers of `update_numbers`; the compiler drops the loads of those that a rule does not use."""
    return scalars(derived, UPDATE_NUMBERS)


@jit
def scalars(place, COUNT: tl.constexpr):
    """Return this number of consecutive numbers."""
    found = ()
    for k in tl.static_range(COUNT):
        found += (tl.load(place + k),)  # type: ignore[assignment]
    return found


@jit
def update_elements(RULE: tl.constexpr, x, g, square, moments, settings, GENERAL: tl.constexpr):
    """Return the new parameter, then the new moments."""
    rate, keep, decay, beta1, rest1, beta2, rest2, unbias2, eps, bias, floor2, stride, coupling, rest = settings
    if RULE == "adamw":
        x *= keep
    elif RULE != "accelerated":
        # Without decay an infinite parameter must not make the direction NaN.
        g = tl.where(decay != 0, g + decay * x, g)

    if RULE == "sgd":
        return (x - rate * g,)
    elif RULE == "momentum":
        m = beta1 * moments[0] + g
        return x - rate * m, m
    elif RULE == "nesterov":
        m = beta1 * moments[0] + g
        return x - rate * (g + beta1 * m), m
    elif RULE == "accelerated":
        z = moments[0] - rate * g
        y = x - stride * g
        return rest * y + coupling * z, z, y
    elif RULE == "adagrad":
        h = g * g if square is None else square
        v = moments[0] + h
        return x - rate * _quotient(g, v, bias, floor2, eps, GENERAL), v
    else:
        h = g * g if square is None else square
        m = beta1 * moments[0] + rest1 * g
        v = beta2 * moments[1] + rest2 * h
        return x - _quotient(rate * m, v * unbias2, bias, floor2, eps, GENERAL), m, v


# Root and quotient are the device's fast ones: at most 2^-23 and 2 ulps off (PTX: sqrt.approx.ftz.f32, div.full.f32);
# `tests/agreement/agreement.py` allows 16. Rounded correctly, both would take an eighth of Adam's instructions. The
# fast root takes u below 2^-126 for 0. An eps of `FAST_EPS` or more hides that; a smaller eps takes the general way.
# The interpreter rounds correctly.
@jit
def _quotient(numerator, u, bias, floor2, eps, GENERAL: tl.constexpr):
    """Return numerator / (sqrt(max(u - bias, floor^2)) + eps), and 0 where that denominator is 0."""
    if GENERAL:
        least = tl.maximum(u - bias, floor2, propagate_nan=tl.PropagateNan.ALL)
        denominator = tl.sqrt_rn(least) + eps
        return tl.where(denominator != 0, tl.div_rn(numerator, denominator), 0.0)
    else:
        return numerator / (tl.sqrt(tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)) + eps)
