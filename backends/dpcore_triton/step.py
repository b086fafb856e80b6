"""Noise, filter and update in one pass over memory: a launch for all tensors together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from dpcore.errors import ArgumentTypeError
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
from dpcore_triton.filter import taps_of
from dpcore_triton.launch import BLOCKS, WARPS, common_device, current_stream, float32_only, launch, numbers, table
from dpcore_triton.ring import ring_taps
from dpcore_triton.step_kernel import step_kernel
from dpcore_triton.stream import cipher_words, programs_of
from dpcore_triton.update import needs_general_denominator, update_numbers

Tensor = torch.Tensor

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
        numbers((float(noise.scale), float(squared.scale), 1 / batch_size), device, current_stream(device), "float64"),
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
            step_kernel,
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
    tensors = [vector for slot in slots for vector in _tensors(slot)]
    for vector in tensors:
        if not isinstance(vector, torch.Tensor):
            raise ArgumentTypeError(
                f"slots with an array of type {type(vector).__name__}: must be torch tensors under backend 'triton'; "
                "use from_numpy"
            )
    described = tuple(
        (vector.data_ptr(), vector.shape, vector.dtype, vector.device, vector.is_contiguous()) for vector in tensors
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
    float32_only(slots=[vector for slot in slots for vector in (slot.parameter, *_tensors(slot)[2:])])
    _checked[key] = common_device(slots=tensors)
    if len(_checked) > _KEPT:
        _checked.popitem(last=False)
    return _checked[key]


def _length(part: Any) -> int | None:
    return len(part) if hasattr(part, "__len__") else None


def _tensors(slot: Slot[Tensor]) -> tuple[Tensor, ...]:
    optional = [array for array in (slot.displacement, slot.scale, slot.square) if array is not None]
    return (slot.parameter, slot.total, *slot.filter_state, *slot.moments, *slot.noise_state, *optional)
