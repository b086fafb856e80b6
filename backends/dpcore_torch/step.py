"""Noise, filter and update in one pass over memory: `dpcore_numpy.step` in torch's threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from dpcore.spec.check import check_step, order_of
from dpcore.spec.ops import FilterCoefficients, NoiseRow, Slot, UpdateSettings
from dpcore.spec.stream import TILE
from dpcore_torch.filter import recurrence
from dpcore_torch.noise import normal
from dpcore_torch.update import update

# Tiles that a thread takes at once: their float64 numbers stay in its processor's cache.
_TILES = 32


def step(
    slots: Sequence[Slot[torch.Tensor]],
    noise: NoiseRow,
    batch_size: float,
    filters: Sequence[FilterCoefficients],
    rule: str,
    settings: Sequence[UpdateSettings],
    step_number: int,
    *,
    correlation: FilterCoefficients | None = None,
    square: str = "filtered",
    square_noise: NoiseRow | None = None,
) -> None:
    """See `dpcore.spec.ops.Backend.step`."""
    check_step(
        slots, noise, batch_size, filters, rule, settings, step_number, correlation, square, square_noise
    )  # fmt: skip
    size = _TILES * TILE * torch.get_num_threads()
    for whole, numbers in zip(slots, settings, strict=True):
        for start in range(0, whole.parameter.numel(), size):
            slot = _slice(whole, start, start + size)
            g = _average(slot, noise, batch_size, correlation)
            y = _filtered(g, slot, filters)
            h = None if square == "filtered" else _square(g, slot, batch_size, square, square_noise)
            before = None if slot.displacement is None else slot.parameter.clone()
            update(rule, slot.parameter, y, slot.moments, numbers, step_number, h)
            if slot.displacement is not None:
                torch.sub(slot.parameter, before, out=slot.displacement)


def _normals(noise: NoiseRow, slot: Slot[torch.Tensor]) -> torch.Tensor:
    kind = str(slot.parameter.dtype).removeprefix("torch.")
    return normal(noise.key, noise.row, noise.stream, slot.first, slot.total.numel(), dtype=kind, rng=noise.rng)


def _average(
    slot: Slot[torch.Tensor], noise: NoiseRow, batch_size: float, correlation: FilterCoefficients | None
) -> torch.Tensor:
    if noise.scale:
        n = _normals(noise, slot)
        if correlation is not None:
            n = recurrence(n, slot.noise_state, correlation)
        average = n.to(torch.float64, copy=True).mul_(noise.scale).add_(slot.total).mul_(1 / batch_size)
    else:
        average = slot.total / batch_size
    g = average.to(slot.parameter.dtype)
    return g if slot.scale is None else g.div_(slot.scale)


def _filtered(g: torch.Tensor, slot: Slot[torch.Tensor], filters: Sequence[FilterCoefficients]) -> torch.Tensor:
    y, done = g, 0
    for coefficients in filters:
        order = order_of(coefficients)
        y = recurrence(y, slot.filter_state[done : done + order], coefficients)
        done += order
    return y


def _square(
    g: torch.Tensor, slot: Slot[torch.Tensor], batch_size: float, square: str, square_noise: NoiseRow | None
) -> torch.Tensor:
    if square == "released":
        return g * g
    if square == "given":
        assert slot.square is not None
        return slot.square
    q = slot.total / batch_size
    if slot.scale is not None:
        q.div_(slot.scale)
    h = q * q
    if square_noise is not None and square_noise.scale:
        h.add_(_normals(square_noise, slot).to(torch.float64, copy=True).mul_(square_noise.scale))
    return h.to(slot.parameter.dtype)


def _slice(slot: Slot[torch.Tensor], start: int, stop: int) -> Slot[torch.Tensor]:
    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        return value.detach().view(-1)[start:stop] if isinstance(value, torch.Tensor) else value

    found = {field.name: cut(getattr(slot, field.name)) for field in fields(slot)}
    return Slot(**found | {"first": slot.first + start})
