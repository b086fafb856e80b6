"""The update stage: one step of a first-order optimizer, in place."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from dpcore.spec.check import check_update
from dpcore.spec.ops import UPDATE_RULES, UpdateSettings
from dpcore_triton.filter import pointers
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
    written_back,
)

UPDATE_NUMBERS = tl.constexpr(9)


def update(
    rule: str,
    parameter: torch.Tensor,
    direction: torch.Tensor,
    moments: Sequence[torch.Tensor],
    settings: UpdateSettings,
    step_number: int,
) -> None:
    """See `dpcore.spec.ops.Backend.update`."""
    check_update(rule, parameter, direction, moments, step_number)
    float32_only(parameter=[parameter])
    device = common_device(parameter=[parameter], direction=[direction], moments=moments)
    direction = direction.detach().contiguous()
    with written_back(parameter, *moments) as lent:
        addresses = [tensor.data_ptr() for tensor in (direction, *lent)]
        rows, _, programs = table([(direction.numel(), *addresses)], [-(-direction.numel() // ELEMENTS)], device)
        derived = numbers(update_numbers(rule, settings, step_number), device, current_stream(device))
        count = UPDATE_RULES[rule]
        launch(_update_kernel, (programs,), device, rows, derived, RULE=rule, MOMENTS=count, ELEMENTS=ELEMENTS)


def update_numbers(rule: str, settings: UpdateSettings, step_number: int) -> tuple[float, ...]:
    """Return the numbers that kernels take for one group of settings, derived in float64."""
    learning_rate, weight_decay, beta1, beta2, eps = settings
    unbias1, unbias2 = 1.0, 1.0
    if rule in ("adam", "adamw"):
        unbias1, unbias2 = 1 - beta1**step_number, 1 - beta2**step_number
    rate, keep = learning_rate / unbias1, 1 - learning_rate * weight_decay
    return rate, keep, weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, 1 / unbias2, eps


@kernel()
def _update_kernel(row, derived, RULE: tl.constexpr, MOMENTS: tl.constexpr, ELEMENTS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = i < tl.load(row + 1)
    direction, parameter = pointers(row, i, 2, 2)
    g = tl.load(direction, mask=mask, other=0.0)
    x = tl.load(parameter, mask=mask, other=0.0)
    x = update_elements(RULE, x, g, pointers(row, i, 4, MOMENTS), mask, settings_of(derived))
    tl.store(parameter, x, mask=mask)


@jit
def settings_of(derived):
    """Return the numbers of `update_numbers`; the compiler drops the loads of those that a rule does not use."""
    rate, keep, decay = tl.load(derived), tl.load(derived + 1), tl.load(derived + 2)
    beta1, rest1, beta2 = tl.load(derived + 3), tl.load(derived + 4), tl.load(derived + 5)
    rest2, unbias2, eps = tl.load(derived + 6), tl.load(derived + 7), tl.load(derived + 8)
    return rate, keep, decay, beta1, rest1, beta2, rest2, unbias2, eps


@jit
def update_elements(RULE: tl.constexpr, x, g, moments, mask, settings):
    """Return the new parameter; moments in place, where their pointers point."""
    rate, keep, decay, beta1, rest1, beta2, rest2, unbias2, eps = settings
    if RULE == "adamw":
        x *= keep
    else:
        # Without decay an infinite parameter must not turn the direction into NaN.
        g = tl.where(decay != 0, g + decay * x, g)

    if RULE == "sgd":
        x -= rate * g
    else:
        m = beta1 * tl.load(moments[0], mask=mask, other=0.0)
        if RULE == "momentum":
            m += g
            x -= rate * m
        else:
            m += rest1 * g
            v = beta2 * tl.load(moments[1], mask=mask, other=0.0) + rest2 * (g * g)
            tl.store(moments[1], v, mask=mask)
            x -= tl.div_rn(rate * m, tl.sqrt_rn(v * unbias2) + eps)
        tl.store(moments[0], m, mask=mask)
    return x
