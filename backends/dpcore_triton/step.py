"""Noise, filter and update in one pass over memory: a launch for all tensors together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

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
from dpcore_triton.correlate import correlation_taps
from dpcore_triton.described import address, pattern, places, present
from dpcore_triton.filter import taps_of
from dpcore_triton.kept import Kept
from dpcore_triton.launch import (
    BLOCKS,
    WARPS,
    common_device,
    current_stream,
    default_device,
    float32_only,
    launch,
    table,
    upload,
)
from dpcore_triton.noise import tables_on
from dpcore_triton.step_kernel import step_kernel
from dpcore_triton.step_numbers import step_numbers
from dpcore_triton.stream import cipher_words, programs_of
from dpcore_triton.update import needs_general_denominator

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Launches:
    """All of a step's launches, except for key and numbers: a function of the description alone."""

    device: torch.device
    law: Tensor  # the tables of the noise
    elements: tuple[int, int]  # of the stream that it may draw: the first one, and their number
    tables: tuple[tuple[Tensor, Tensor, int, dict[str, Any]], ...]  # of each launch: arguments, programs, constants


class Planned(NamedTuple):
    """A step that was checked, for `start`."""

    launches: Launches
    ciphers: tuple[int, ...]
    numbers: NDArray[np.int32]

    @property
    def key(self) -> Hashable:
        """All that `start` reads but the numbers: steps with equal keys make the same launches, addresses included."""
        return self.launches, self.ciphers


_kept = Kept[Launches](64)


def step(
    slots: Sequence[Slot[Tensor]],
    noise: NoiseRow,
    batch_size: float,
    filters: Sequence[FilterCoefficients],
    rule: str,
    settings: Sequence[UpdateSettings],
    step_number: int,
    *,
    unit: float,
    correlation: Correlation | None = None,
    square: str = "filtered",
    square_noise: NoiseRow | None = None,
) -> None:
    """See `dpcore.spec.ops.Backend.step`."""
    planned = plan(
        slots, noise, batch_size, filters, rule, settings, step_number, unit, correlation, square, square_noise
    )  # fmt: skip
    start(planned, upload(planned.numbers, planned.launches.device))


def start(planned: Planned, numbers: Tensor) -> None:
    """Make the launches of a step, which read its numbers from the device."""
    for rows, row_of, programs, meta in planned.launches.tables:
        launch(
            step_kernel, (programs,), planned.launches.device, rows, row_of, numbers, planned.launches.law,
            *planned.ciphers,
            **meta, BLOCKS=BLOCKS, warps=WARPS,
        )  # fmt: skip


def plan(
    slots: Sequence[Slot[Tensor]],
    noise: NoiseRow,
    batch_size: float,
    filters: Sequence[FilterCoefficients],
    rule: str,
    settings: Sequence[UpdateSettings],
    step_number: int,
    unit: float,
    correlation: Correlation | None,
    square: str,
    square_noise: NoiseRow | None,
) -> Planned:
    """Check everything; tensors that were checked before, by their description only."""
    described = _described(slots)
    used = correlation if noise.scale else None
    ring, recurrence = (used, None) if isinstance(used, RingCoefficients) else (None, used)
    taps = 0 if used is None else len(correlation_taps(used)) - 1
    squared = noise._replace(scale=0.0) if square_noise is None else square_noise
    group, groups = _grouped(settings)
    shape = (
        ("RULE", rule),
        ("RNG", noise.rng if noise.scale else None),
        ("NOISE_TAPS", taps),
        ("NOISE_NB", 0 if recurrence is None else len(recurrence.b)),
        ("RING", None if ring is None else ring.keeps),
        ("RING_ORDER", 0 if ring is None else len(ring.weights)),
        ("TAPS", sum(len(taps_of(coefficients)) for coefficients in filters)),
        ("FILTERS", _places(filters)),
        ("ORDER", sum(map(order_of, filters))),
        ("SQUARE", square),
        ("SQUARE_RNG", squared.rng if squared.scale else None),
        ("MOMENTS", UPDATE_RULES.get(rule)),
        ("GENERAL", needs_general_denominator(rule, group)),
    )
    lengths = tuple(tuple(map(_length, f)) for f in (*filters, *(() if correlation is None else (correlation,))))
    device = slots[0].parameter.device if slots else default_device()
    key = (described, groups, shape, lengths, type(correlation), current_stream(device))
    launches = _kept.get(key)
    common = (noise, batch_size, filters, rule)
    options = (correlation, square, square_noise)
    if launches is None:
        check_step(slots, *common, settings, step_number, unit, *options)
        float32_only(slots=[vector for slot in slots for vector in _narrow(slot)])
        common_device(slots=[vector for slot in slots for vector in (slot.total, *slot.noise_state, *_narrow(slot))])
        launches = _kept.put(key, _launches(slots, groups, shape, device))
    else:
        check_step((), *common, (), step_number, unit, *options)
    ciphers = (*_cipher(noise, launches.elements), *_cipher(squared, launches.elements))
    numbers = step_numbers(noise, squared, batch_size, unit, used, filters, rule, tuple(group), step_number)
    return Planned(launches, ciphers, numbers)


def _grouped(settings: Sequence[UpdateSettings]) -> tuple[dict[UpdateSettings, int], tuple[int, ...]]:
    """Return the settings in use, numbered, and the number of each slot's.

    Most slots share theirs: each object is looked up by its id first, which is faster than by its nine numbers.
    """
    objects = {id(each): each for each in settings}
    group = {chosen: index for index, chosen in enumerate(dict.fromkeys(objects.values()))}
    numbers = {place: group[chosen] for place, chosen in objects.items()}
    return group, tuple([numbers[id(each)] for each in settings])


def _described(slots: Sequence[Slot[Tensor]]) -> Hashable:
    """Return everything of the slots on which a launch can depend."""
    if not slots:
        return ()
    parameters, totals, firsts, filters, moments, displacements, noise, scales, squares = zip(*slots, strict=True)
    arrays, shape = [*parameters, *totals], list[Hashable]([firsts])
    for states in (filters, moments, noise):
        shape.append(tuple(map(len, states)))
        arrays += chain.from_iterable(states)
    for vectors in (displacements, scales, squares):
        shape.append(pattern(vectors))
        arrays += present(vectors)
    found = places(arrays)
    if found is None:
        kind = next(type(array).__name__ for array in arrays if not isinstance(array, torch.Tensor))
        raise ArgumentTypeError(
            f"slots with an array of type {kind}: must be torch tensors under backend 'triton'; use from_numpy"
        )
    return found, tuple(shape)


def _launches(
    slots: Sequence[Slot[Tensor]], groups: tuple[int, ...], shape: tuple[tuple[str, Any], ...], device: torch.device
) -> Launches:
    constants = dict(shape)
    correlated = constants["NOISE_TAPS"] > 0
    kinds: dict[tuple[int, bool, bool], list[int]] = {}
    for index, slot in enumerate(slots):
        noise_order = len(slot.noise_state) if constants["NOISE_NB"] else 0
        kinds.setdefault((noise_order, slot.scale is not None, slot.displacement is not None), []).append(index)
    sizes = [slot.parameter.numel() for slot in slots]
    tables = []
    for (noise_order, scaled, displaced), members in kinds.items():
        rows = [_row(slots[index], groups[index], correlated) for index in members]
        programs = [programs_of(slots[index].first, sizes[index]) for index in members]
        meta = {**constants, "NOISE_ORDER": noise_order, "SCALED": scaled, "DISPLACED": displaced}
        tables.append((*table(rows, programs, device), meta))
    first = min((slot.first for slot in slots), default=0)
    last = max((slot.first + size for slot, size in zip(slots, sizes, strict=True)), default=0)
    law = tables_on(device, current_stream(device))
    return Launches(device, law, (first, last - first), tuple(tables))


def _row(slot: Slot[Tensor], group: int, correlated: bool) -> tuple[int, ...]:
    singles = (slot.total, slot.parameter, slot.displacement, slot.scale, slot.square)
    states = (*(slot.noise_state if correlated else ()), *slot.filter_state, *slot.moments)
    return slot.first, slot.parameter.numel(), group, *map(address, (*singles, *states))


def _cipher(noise: NoiseRow, elements: tuple[int, int]) -> tuple[int, ...]:
    """Return key, stream and 1: all arguments of the cipher except the row, which is among the numbers."""
    words = cipher_words(noise.key, noise.row, noise.stream, *elements, noise.rng)
    return *words[:8], *words[9:]


def _places(filters: Sequence[FilterCoefficients]) -> tuple[tuple[int, ...], ...]:
    """Return the places of each filter's numbers: its first tap, the next one's, len(b), and the same of its state."""
    found, tap, state = [], 0, 0
    for coefficients in filters:
        taps, order = len(taps_of(coefficients)), order_of(coefficients)
        found.append((tap, tap + taps, len(coefficients.b), state, state + order))
        tap, state = tap + taps, state + order
    return tuple(found)


def _length(part: Any) -> int | None:
    return len(part) if hasattr(part, "__len__") else None


def _narrow(slot: Slot[Tensor]) -> tuple[Tensor, ...]:
    """Return a slot's tensors that must be float32."""
    optional = [array for array in (slot.displacement, slot.scale, slot.square) if array is not None]
    return (slot.parameter, *slot.filter_state, *slot.moments, *optional)
