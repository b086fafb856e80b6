"""Noise, filter and update in one pass over memory: a launch for all tensors together."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import triton.language as tl

from dpcore.spec.check import check_step, order_of
from dpcore.spec.ops import (
    UPDATE_RULES,
    Correlation,
    FilterCoefficients,
    NoiseRow,
    RingCoefficients,
    Slot,
    UpdateSettings,
)
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
from dpcore_triton.noise import normals
from dpcore_triton.ring import ring_elements, ring_taps
from dpcore_triton.stream import CIPHER, LANES, cipher_words, counters, inside, locate, places, programs_of
from dpcore_triton.update import (
    UPDATE_NUMBERS,
    needs_general_denominator,
    settings_of,
    update_elements,
    update_numbers,
)

Tensor = torch.Tensor

SQUARE_CIPHER = ("s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "square_row", "square_stream")

_KEPT = 64
_checked: OrderedDict[tuple[Any, ...], torch.device] = OrderedDict()


def step(
    slots: Sequence[Slot[Tensor]],
    noise: NoiseRow,
    batch_size: float,
    filters: Sequence[FilterCoefficients],
    rule: str,
    settings: Sequence[UpdateSettings],
    step_number: int,
    *,
    correlation: Correlation | None = None,
    square: str = "filtered",
    square_noise: NoiseRow | None = None,
) -> None:
    """See `dpcore.spec.ops.Backend.step`."""
    device = _check(
        slots, noise, batch_size, filters, rule, settings, step_number, correlation, square, square_noise
    )  # fmt: skip
    correlation = correlation if noise.scale else None
    ring = correlation if isinstance(correlation, RingCoefficients) else None
    recurrence = None if isinstance(correlation, RingCoefficients) else correlation
    squared = noise._replace(scale=0.0) if square_noise is None else square_noise
    group = {chosen: index for index, chosen in enumerate(dict.fromkeys(settings))}
    derived = tuple(chain.from_iterable(update_numbers(rule, chosen, step_number) for chosen in group))
    shape = {
        "RULE": rule,
        "RNG": noise.rng if noise.scale else None,
        "NOISE_NB": 0 if recurrence is None else len(recurrence.b),
        "RING": None if ring is None else ring.keeps,
        "RING_ORDER": 0 if ring is None else len(ring.weights),
        "FILTERS": _places(filters),
        "ORDER": sum(map(order_of, filters)),
        "SQUARE": square,
        "SQUARE_RNG": squared.rng if squared.scale else None,
        "MOMENTS": UPDATE_RULES[rule],
        "GENERAL": needs_general_denominator(rule, group),
    }
    arguments = (
        *_cipher(noise, slots),
        *_cipher(squared, slots),
        float(noise.scale),
        float(squared.scale),
        1 / batch_size,
        () if recurrence is None else taps_of(recurrence),
        tuple(chain.from_iterable(map(taps_of, filters))),
    )
    kinds: dict[tuple[int, bool, bool], list[int]] = {}
    for index, slot in enumerate(slots):
        noise_order = 0 if recurrence is None else len(slot.noise_state)
        kind = (noise_order, slot.scale is not None, slot.displacement is not None)
        kinds.setdefault(kind, []).append(index)

    for (noise_order, scaled, displaced), members in kinds.items():
        rows, row_of, programs = table(
            [_row(slots[index], group[settings[index]], correlation is not None) for index in members],
            [programs_of(slots[index].first, slots[index].parameter.numel()) for index in members],
            device,
        )
        launch(
            _step_kernel,
            (programs,),
            device,
            rows,
            row_of,
            *arguments,
            numbers(derived, device, current_stream(device)),
            None if ring is None else numbers(ring_taps(ring), device, current_stream(device)),
            0 if ring is None else int(ring.place),
            **shape,
            NOISE_ORDER=noise_order,
            SCALED=scaled,
            DISPLACED=displaced,
            BLOCKS=BLOCKS,
            warps=WARPS,
        )


def _cipher(noise: NoiseRow, slots: Sequence[Slot[Tensor]]) -> tuple[int, ...]:
    first = min((slot.first for slot in slots), default=0)
    last = max((slot.first + slot.parameter.numel() for slot in slots), default=0)
    return cipher_words(noise.key, noise.row, noise.stream, first, last - first, noise.rng)


def _places(filters: Sequence[FilterCoefficients]) -> tuple[tuple[int, ...], ...]:
    """Return where each filter's numbers stand: its first tap, the next one's, len(b), and the same of its state."""
    found, tap, state = [], 0, 0
    for coefficients in filters:
        taps, order = len(taps_of(coefficients)), order_of(coefficients)
        found.append((tap, tap + taps, len(coefficients.b), state, state + order))
        tap, state = tap + taps, state + order
    return tuple(found)


def _row(slot: Slot[Tensor], group: int, correlated: bool) -> tuple[int, ...]:
    single = (slot.total, slot.parameter, slot.displacement, slot.scale, slot.square)
    states = (*(slot.noise_state if correlated else ()), *slot.filter_state, *slot.moments)
    addresses = [0 if array is None else array.data_ptr() for array in (*single, *states)]
    return slot.first, slot.parameter.numel(), group, *addresses


def _check(
    slots: Sequence[Slot[Tensor]],
    noise: NoiseRow,
    batch_size: float,
    filters: Sequence[FilterCoefficients],
    rule: str,
    settings: Sequence[UpdateSettings],
    step_number: int,
    correlation: Correlation | None,
    square: str,
    square_noise: NoiseRow | None,
) -> torch.device:
    """Check everything, but tensors seen before by their description only: a second look would find the same."""
    described = tuple(
        (vector.data_ptr(), vector.shape, vector.dtype, vector.device, vector.is_contiguous())
        for slot in slots
        for vector in _tensors(slot)
    )
    lists = tuple((len(slot.filter_state), len(slot.moments), len(slot.noise_state)) for slot in slots)
    optional = tuple((slot.displacement is None, slot.scale is None, slot.square is None) for slot in slots)
    lengths = tuple(tuple(map(_length, f)) for f in (*filters, *(() if correlation is None else (correlation,))))
    key = (described, lists, optional, len(settings), lengths, type(correlation), rule, square)
    if key in _checked:
        check_step((), noise, batch_size, filters, rule, (), step_number, correlation, square, square_noise)
        _checked.move_to_end(key)
        return _checked[key]
    check_step(slots, noise, batch_size, filters, rule, settings, step_number, correlation, square, square_noise)
    tensors = [vector for slot in slots for vector in _tensors(slot)]
    float32_only(slots=[vector for slot in slots for vector in (slot.parameter, *_tensors(slot)[2:])])
    _checked[key] = common_device(slots=tensors)
    if len(_checked) > _KEPT:
        _checked.popitem(last=False)
    return _checked[key]


def _length(part: Any) -> int | None:
    return len(part) if isinstance(part, tuple) else None


def _tensors(slot: Slot[Tensor]) -> tuple[Tensor, ...]:
    optional = [array for array in (slot.displacement, slot.scale, slot.square) if array is not None]
    return (slot.parameter, slot.total, *slot.filter_state, *slot.moments, *slot.noise_state, *optional)


@kernel(*CIPHER, *SQUARE_CIPHER, "ring_place")
def _step_kernel(
    rows, row_of, k0, k1, k2, k3, k4, k5, k6, k7, noise_row, noise_stream,
    s0, s1, s2, s3, s4, s5, s6, s7, square_row, square_stream,
    scale, square_scale, per_example, noise_taps, taps, derived, ring_taps, ring_place,
    RULE: tl.constexpr, RNG: tl.constexpr, NOISE_NB: tl.constexpr, NOISE_ORDER: tl.constexpr, RING: tl.constexpr,
    RING_ORDER: tl.constexpr, SCALED: tl.constexpr, FILTERS: tl.constexpr, ORDER: tl.constexpr, SQUARE: tl.constexpr,
    SQUARE_RNG: tl.constexpr,
    MOMENTS: tl.constexpr, GENERAL: tl.constexpr, DISPLACED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, start = locate(rows, row_of, 9 + RING_ORDER + NOISE_ORDER + ORDER + MOMENTS, BLOCKS)
    if SQUARE_RNG is not None:
        square_cipher = (s0, s1, s2, s3, s4, s5, s6, s7, square_row, square_stream)
        z_square = normals(square_cipher, counters(row, start, BLOCKS), SQUARE_RNG)
    if RNG is not None:
        cipher = (k0, k1, k2, k3, k4, k5, k6, k7, noise_row, noise_stream)
        z = normals(cipher, counters(row, start, BLOCKS), RNG)
    place, low, high, origin = places(row, start, BLOCKS)
    if RING is not None:
        z = ring_elements(z, row + 9, origin + place, place, low, high, ring_taps, ring_place, RING_ORDER, RING)
    total = tl.load(row + 4).to(tl.pointer_type(tl.float64)) + (origin + place)
    arrays = pointers(row, origin + place, 5, 4)
    arrays += pointers(row, origin + place, 9 + RING_ORDER, NOISE_ORDER + ORDER + MOMENTS)
    settings = settings_of(derived + tl.load(row + 3) * UPDATE_NUMBERS)
    scales = (scale, square_scale, per_example)
    for word in tl.static_range(16):
        step_elements(
            None if RNG is None else z[word], None if SQUARE_RNG is None else z_square[word],
            total + word * LANES, shifted(arrays, word * LANES), inside(place + word * LANES, low, high),
            scales, noise_taps, taps, settings,
            RULE, NOISE_NB, NOISE_ORDER, SCALED, FILTERS, ORDER, SQUARE, GENERAL, DISPLACED,
        )  # fmt: skip


@jit
def step_elements(
    z, z_square, total, arrays, mask, scales, noise_taps, taps, settings,
    RULE: tl.constexpr, NOISE_NB: tl.constexpr, NOISE_ORDER: tl.constexpr, SCALED: tl.constexpr, FILTERS: tl.constexpr,
    ORDER: tl.constexpr, SQUARE: tl.constexpr, GENERAL: tl.constexpr, DISPLACED: tl.constexpr,
):  # fmt: skip
    """Step the elements that `total` and `arrays` point to; `z` and `z_square` are None where none are drawn."""
    parameter, displacement, scale, square, states = arrays[0], arrays[1], arrays[2], arrays[3], arrays[4:]
    noise_state, filter_state = states[:NOISE_ORDER], states[NOISE_ORDER : NOISE_ORDER + ORDER]
    g = _average(z, total, scale, noise_state, mask, scales, noise_taps, NOISE_NB, SCALED)
    y = _filtered(g, filter_state, mask, taps, FILTERS)
    h = None
    if SQUARE != "filtered":
        h = _square(g, z_square, total, scale, square, mask, scales, SQUARE, SCALED)
    before = tl.load(parameter, mask=mask, other=0.0)
    x = update_elements(RULE, before, y, h, states[NOISE_ORDER + ORDER :], mask, settings, GENERAL)
    tl.store(parameter, x, mask=mask)
    if DISPLACED:
        tl.store(displacement, x - before, mask=mask)


@jit
def _average(z, total, scale, noise_state, mask, scales, taps, NOISE_NB: tl.constexpr, SCALED: tl.constexpr):
    """Return the private average, in the coordinates of the parameter."""
    average = tl.load(total, mask=mask, other=0.0)
    if z is not None:
        n = z
        if NOISE_NB > 0:
            n = recurrence_elements(z, noise_state, mask, taps, NOISE_NB)
        average += scales[0] * n.to(tl.float64)
    g = (average * scales[2]).to(tl.float32)
    if SCALED:
        g = tl.div_rn(g, tl.load(scale, mask=mask, other=1.0))
    return g


@jit
def _filtered(g, states, mask, taps, FILTERS: tl.constexpr):
    """Return the output of the chain of filters."""
    y = g
    for k in tl.static_range(len(FILTERS)):
        own = states[FILTERS[k][3] : FILTERS[k][4]]
        y = recurrence_elements(y, own, mask, taps[FILTERS[k][0] : FILTERS[k][1]], FILTERS[k][2])
    return y


@jit
def _square(g, z, total, scale, square, mask, scales, SQUARE: tl.constexpr, SCALED: tl.constexpr):
    """Return what enters the second moment."""
    if SQUARE == "released":
        return g * g
    elif SQUARE == "given":
        return tl.load(square, mask=mask, other=0.0)
    else:
        q = tl.load(total, mask=mask, other=0.0) * scales[2]
        if SCALED:
            q = q / tl.load(scale, mask=mask, other=1.0).to(tl.float64)
        h = q * q
        if z is not None:
            h += scales[1] * z.to(tl.float64)
        return h.to(tl.float32)
