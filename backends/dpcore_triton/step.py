"""Noise, filter and update in one pass over memory: a launch for all tensors together."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import triton.language as tl

from dpcore.spec.check import check_step
from dpcore.spec.ops import UPDATE_RULES, FilterCoefficients, NoiseRow, Slot, UpdateSettings
from dpcore_triton.filter import pointers, recurrence_elements, shifted, taps_of
from dpcore_triton.launch import (
    BLOCKS,
    WARPS,
    common_device,
    current_stream,
    float32_only,
    jit,
    kernel,
    launch,
    numbers,
    table,
)
from dpcore_triton.noise import box_muller, normal_words
from dpcore_triton.stream import CIPHER, LANES, cipher_words, counters, inside, locate, places, programs_of
from dpcore_triton.update import UPDATE_NUMBERS, settings_of, update_elements, update_numbers

Tensor = torch.Tensor

_KEPT = 64
_checked: OrderedDict[tuple[Any, ...], torch.device] = OrderedDict()


def step(
    slots: Sequence[Slot[Tensor]],
    noise: NoiseRow,
    batch_size: float,
    coefficients: FilterCoefficients,
    rule: str,
    settings: Sequence[UpdateSettings],
    step_number: int,
) -> None:
    """See `dpcore.spec.ops.Backend.step`."""
    device = _check(slots, noise, batch_size, coefficients, rule, settings, step_number)
    first = min((slot.first for slot in slots), default=0)
    last = max((slot.first + slot.parameter.numel() for slot in slots), default=0)
    cipher = cipher_words(noise.key, noise.row, noise.stream, first, last - first, noise.rng)
    group = {chosen: index for index, chosen in enumerate(dict.fromkeys(settings))}
    derived = tuple(chain.from_iterable(update_numbers(rule, chosen, step_number) for chosen in group))
    kinds: dict[tuple[int, bool], list[int]] = {}
    for index, slot in enumerate(slots):
        kinds.setdefault((len(slot.filter_state), slot.displacement is not None), []).append(index)

    for (order, displaced), members in kinds.items():
        rows, row_of, programs = table(
            [_row(slots[index], group[settings[index]]) for index in members],
            [programs_of(slots[index].first, slots[index].parameter.numel()) for index in members],
            device,
        )
        launch(
            _step_kernel,
            (programs,),
            device,
            rows,
            row_of,
            *cipher,
            float(noise.scale),
            1 / batch_size,
            taps_of(coefficients),
            numbers(derived, device, current_stream(device)),
            RULE=rule,
            NOISE=noise.scale != 0,
            RNG=noise.rng,
            NB=len(coefficients.b),
            ORDER=order,
            MOMENTS=UPDATE_RULES[rule],
            DISPLACED=displaced,
            BLOCKS=BLOCKS,
            warps=WARPS,
        )


def _row(slot: Slot[Tensor], group: int) -> tuple[int, ...]:
    displacement = 0 if slot.displacement is None else slot.displacement.data_ptr()
    state = [vector.data_ptr() for vector in (*slot.filter_state, *slot.moments)]
    return (
        slot.first,
        slot.parameter.numel(),
        group,
        slot.total.data_ptr(),
        slot.parameter.data_ptr(),
        displacement,
        *state,
    )


def _check(
    slots: Sequence[Slot[Tensor]],
    noise: NoiseRow,
    batch_size: float,
    coefficients: FilterCoefficients,
    rule: str,
    settings: Sequence[UpdateSettings],
    step_number: int,
) -> torch.device:
    """Check everything, but tensors seen before by their description only: a second look would find the same."""
    described = tuple(
        (vector.data_ptr(), vector.shape, vector.dtype, vector.device, vector.is_contiguous())
        for slot in slots
        for vector in _tensors(slot)
    )
    shape = tuple((len(slot.filter_state), len(slot.moments), slot.displacement is None) for slot in slots)
    key = (described, shape, len(settings), len(coefficients.b), len(coefficients.a), rule)
    if key in _checked:
        check_step((), noise, batch_size, coefficients, rule, (), step_number)
        _checked.move_to_end(key)
        return _checked[key]
    check_step(slots, noise, batch_size, coefficients, rule, settings, step_number)
    tensors = [vector for slot in slots for vector in _tensors(slot)]
    float32_only(slots=tensors)
    _checked[key] = common_device(slots=tensors)
    if len(_checked) > _KEPT:
        _checked.popitem(last=False)
    return _checked[key]


def _tensors(slot: Slot[Tensor]) -> tuple[Tensor, ...]:
    displacement = () if slot.displacement is None else (slot.displacement,)
    return (slot.parameter, slot.total, *slot.filter_state, *slot.moments, *displacement)


@kernel(*CIPHER)
def _step_kernel(
    rows, row_of, k0, k1, k2, k3, k4, k5, k6, k7, noise_row, noise_stream, scale, per_example, taps, derived,
    RULE: tl.constexpr, NOISE: tl.constexpr, RNG: tl.constexpr, NB: tl.constexpr, ORDER: tl.constexpr,
    MOMENTS: tl.constexpr, DISPLACED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, start = locate(rows, row_of, 7 + ORDER + MOMENTS, BLOCKS)
    place, low, high, origin = places(row, start, BLOCKS)
    arrays = pointers(row, origin + place, 4, 3 + ORDER + MOMENTS)
    settings = settings_of(derived + tl.load(row + 3) * UPDATE_NUMBERS)
    if NOISE:
        cipher = (k0, k1, k2, k3, k4, k5, k6, k7, noise_row, noise_stream)
        block, fraction = normal_words(cipher, counters(row, start, BLOCKS), RNG)
    for word in tl.static_range(0, 16, 2):
        z0, z1 = 0.0, 0.0
        if NOISE:
            z0, z1 = box_muller(block[word], block[word + 1], fraction[word // 2])
            z0, z1 = scale * z0, scale * z1
        mask = inside(place + word * LANES, low, high)
        step_elements(z0, arrays, word * LANES, mask, per_example, taps, settings, RULE, NB, ORDER, DISPLACED)
        mask = inside(place + (word + 1) * LANES, low, high)
        step_elements(z1, arrays, (word + 1) * LANES, mask, per_example, taps, settings, RULE, NB, ORDER, DISPLACED)


@jit
def step_elements(
    noise, arrays, shift, mask, per_example, taps, settings,
    RULE: tl.constexpr, NB: tl.constexpr, ORDER: tl.constexpr, DISPLACED: tl.constexpr,
):  # fmt: skip
    """Step the elements that lie `shift` behind the pointers in `arrays`."""
    moved = shifted(arrays, shift)
    g = (tl.load(moved[0], mask=mask, other=0.0) + noise) * per_example
    y = recurrence_elements(g, moved[3 : 3 + ORDER], mask, taps, NB)
    before = tl.load(moved[1], mask=mask, other=0.0)
    x = update_elements(RULE, before, y, moved[3 + ORDER :], mask, settings)
    tl.store(moved[1], x, mask=mask)
    if DISPLACED:
        tl.store(moved[2], x - before, mask=mask)
