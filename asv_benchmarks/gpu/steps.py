"""The fused step in all the forms that are measured: arrays, the bytes that must move, and a check at full size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpcore.spec.backends import load_backend
from dpcore.spec.ops import (
    SECOND_MOMENT,
    UPDATE_RULES,
    FilterCoefficients,
    NoiseRow,
    RingCoefficients,
    Slot,
    UpdateSettings,
)

KEY = bytes(range(32))
BATCH, NOISE = 256.0, 1.1
UNIT = NOISE * 2.0**-36  # the grid of sums and noise
TILE = 4096  # a tensor's first element of the stream is a multiple of it
WINDOW = 4096
# Float32 arithmetic lands well below; a wrong element, or one that was not written, far above.
LARGEST_DISTANCE = 3e-6
FILTERS = {
    1: FilterCoefficients(b=(1 / 11, 1 / 11), a=(-9 / 11,)),
    2: FilterCoefficients(b=(1 / 58, 2 / 58, 1 / 58), a=(-92 / 58, 38 / 58)),
}
NOISE_FILTER = FilterCoefficients(b=(1.0, -0.4), a=(-0.5,))


@dataclass(frozen=True)
class Case:
    """A form of the step: `order` of the filter, `bands` of a banded strategy, `noise_order` of a recurrence."""

    rule: str = "adam"
    rng: str | None = "chacha20"
    order: int = 0
    bands: int = 0
    noise_order: int = 0
    displaced: bool = False
    scaled: bool = False


CASES = {
    **{
        f"{rule}, {rng or 'no noise'}": Case(rule, rng)
        for rule in ("sgd", "momentum", "adam", "adamw")
        for rng in ("chacha20", "philox", None)
    },
    "sgd, banded 8": Case("sgd", bands=8),
    "sgd, banded 32": Case("sgd", bands=32),
    "adam, banded 8": Case(bands=8),
    "adam, banded 32": Case(bands=32),
    "sgd, noise by a recurrence of order 1": Case("sgd", noise_order=1),
    "adam, filter of order 1": Case(order=1),
    "adam, filter of order 2": Case(order=2),
    "sgd, filter of order 1, displacement (as DiSK)": Case("sgd", order=1, displaced=True),
    "adam, scale": Case(scaled=True),
}
# Every rule and every part of the step: a form takes seconds to compile, and the checks have no time for all of them.
WATCHED = (
    "sgd, no noise", "sgd, chacha20", "momentum, philox", "adam, chacha20", "adamw, chacha20", "adam, banded 8",
    "sgd, noise by a recurrence of order 1", "adam, filter of order 2",
    "sgd, filter of order 1, displacement (as DiSK)", "adam, scale",
)  # fmt: skip


def ring_weights(bands: int) -> tuple[float, ...]:
    """Return -c_j of the square root (1 - x)^(-1/2) for the first bands; c_0 is 1."""
    series = [1.0]
    for k in range(1, bands):
        series.append(series[-1] * (2 * k - 1) / (2 * k))
    return tuple(-value for value in series[1:])


class Steps:
    """Tensors of some sizes with random state, and the steps of a case on them."""

    def __init__(self, case: Case, sizes: Sequence[int], device: str, seed: int = 0) -> None:
        self.case, self.ops, self.number = case, load_backend("triton"), 0
        self._drawn = torch.Generator(device).manual_seed(seed)
        self.slots: list[Slot[Any]] = []
        first = 0
        for size in sizes:
            self.slots.append(self._slot(size, first, device))
            first += -(-size // TILE) * TILE

    def _slot(self, size: int, first: int, device: str) -> Slot[Any]:
        case = self.case

        def normal(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(size, device=device, dtype=dtype, generator=self._drawn).mul_(scale)

        moments = [normal(scale=0.1) for _ in range(UPDATE_RULES[case.rule])]
        if case.rule in SECOND_MOMENT:
            moments[SECOND_MOMENT[case.rule]].abs_()
        return Slot(
            normal(),
            normal(torch.float64, 16.0 / UNIT).round_(),
            first,
            filter_state=tuple(normal(scale=0.01) for _ in range(case.order)),
            moments=tuple(moments),
            displacement=torch.full((size,), float("nan"), device=device) if case.displaced else None,
            noise_state=tuple(normal(torch.float64) for _ in range(max(case.bands - 1, case.noise_order))),
            scale=normal().abs_().add_(0.5) if case.scaled else None,
        )

    def copy(self) -> Steps:
        """Return another one in the same state, with arrays of its own."""
        other = object.__new__(Steps)
        other.case, other.ops, other.number = self.case, self.ops, self.number
        other.slots = [_mapped(slot, torch.clone) for slot in self.slots]
        return other

    def step(self) -> None:
        """Take the next step."""
        self._take(self.ops, self.slots)
        self.number += 1

    def _take(self, ops: Any, slots: Sequence[Slot[Any]]) -> None:
        case, correlation = self.case, None
        if case.bands:
            weights = ring_weights(case.bands)
            correlation = RingCoefficients(weights, self.number % len(weights), 1.0, "output")
        noise = NoiseRow(KEY, self.number, 0, NOISE if case.rng else 0.0, case.rng or "chacha20")
        settings = UpdateSettings(0.1, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8)
        filters = (FILTERS[case.order],) if case.order else ()
        ops.step(
            slots, noise, BATCH, filters, case.rule, [settings] * len(slots), self.number + 1,
            unit=UNIT, correlation=NOISE_FILTER if case.noise_order else correlation,
        )  # fmt: skip

    def bytes_moved(self) -> int:
        """Return the fewest bytes of a step: each array read once, and written once if it changes."""
        total = 0
        for slot in self.slots:
            changed = (slot.parameter, *slot.filter_state, *slot.moments)
            changed += slot.noise_state if self.case.noise_order else ()
            total += slot.total.nbytes + 2 * sum(array.nbytes for array in changed)
            if self.case.bands:  # all of the ring is read, one of its vectors is written
                total += sum(array.nbytes for array in slot.noise_state) + slot.noise_state[0].nbytes
            total += sum(array.nbytes for array in (slot.displacement, slot.scale) if array is not None)
        return total

    def coordinates(self) -> int:
        """Return the number of parameters."""
        return sum(slot.parameter.numel() for slot in self.slots)

    def check(self) -> dict[str, Any]:
        """Take a step and compare windows of it with the NumPy reference; raise if they differ or a tile rests.

        A coordinate's step depends on nothing but itself and its place in the stream, so that a window is a tensor.
        """
        reference, places = load_backend("numpy"), list(self._windows())
        for slot in self.slots:
            if slot.displacement is not None:
                slot.displacement.fill_(float("nan"))
        expected = [_cut(self.slots[index], start, stop) for index, start, stop in places]
        before = [slot.parameter.clone() for slot in self.slots]
        self._take(self.ops, self.slots)
        with np.errstate(all="ignore"):
            self._take(reference, expected)
        self.number += 1
        largest = 0.0
        for (index, start, stop), slot in zip(places, expected, strict=True):
            got = _cut(self.slots[index], start, stop)
            pairs = zip(_arrays(got), _arrays(slot), strict=True)
            largest = max([largest, *(distance(a, b) for a, b in pairs)], key=lambda value: (value != value, value))
        if not largest <= LARGEST_DISTANCE:
            raise AssertionError(
                f"the step differs from the reference by {largest:.1e}, allowed are {LARGEST_DISTANCE}"
            )
        for old, slot in zip(before, self.slots, strict=True):
            _check_written(old, slot)
        return {"windows": len(places), "largest_distance": largest}

    def _windows(self) -> Iterator[tuple[int, int, int]]:
        for index in sorted({0, len(self.slots) - 1}):
            size = self.slots[index].parameter.numel()
            for start in sorted({0, max(0, size // 2 - 1), max(0, size - WINDOW)}):
                yield index, start, min(start + WINDOW, size)


def distance(got: Any, expected: Any) -> float:
    """Return ||got - expected|| / ||expected||; NaN if either has one."""
    wide = np.asarray(expected, np.float64)
    return float(np.linalg.norm(np.asarray(got, np.float64) - wide) / max(float(np.linalg.norm(wide)), 1e-300))


def _arrays(slot: Slot[Any]) -> list[Any]:
    """Return the arrays that a step changes."""
    displaced = [] if slot.displacement is None else [slot.displacement]
    return [slot.parameter, *slot.filter_state, *slot.moments, *slot.noise_state, *displaced]


def same_bits(one: Steps, other: Steps) -> bool:
    """Whether two of them hold the same bits."""
    pairs = [
        pair for a, b in zip(one.slots, other.slots, strict=True) for pair in zip(_arrays(a), _arrays(b), strict=True)
    ]
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def _mapped(slot: Slot[Any], change: Any) -> Slot[Any]:
    def one(array: Any) -> Any:
        return None if array is None else change(array)

    return slot._replace(
        parameter=one(slot.parameter),
        total=one(slot.total),
        filter_state=tuple(map(one, slot.filter_state)),
        moments=tuple(map(one, slot.moments)),
        displacement=one(slot.displacement),
        noise_state=tuple(map(one, slot.noise_state)),
        scale=one(slot.scale),
    )


def _cut(slot: Slot[Any], start: int, stop: int) -> Slot[Any]:
    """Return NumPy copies of coordinates start .. stop - 1."""
    found = _mapped(slot, lambda array: np.array(array[start:stop].cpu().numpy(), copy=True))
    return found._replace(first=slot.first + start)


def _check_written(before: torch.Tensor, slot: Slot[Any]) -> None:
    """Refuse values that are not finite, and 128 neighbors that did not move: no program worked there."""
    for array in _arrays(slot):
        if not bool(torch.isfinite(array).all()):
            raise AssertionError("the step left numbers that are not finite")
    whole = before.numel() // 128 * 128
    rests = (before == slot.parameter)[:whole].view(-1, 128).all(1)
    if bool(rests.any()):
        raise AssertionError(f"{int(rests.sum())} of {len(rests)} blocks of 128 parameters did not move")
