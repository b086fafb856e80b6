"""The fused step is the composition of the plain operations, whatever the threads and the pieces."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import dpcore_numpy as backend
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.ops import UPDATE_RULES, FilterCoefficients, NoiseRow, Slot, UpdateSettings

KEY = bytes(range(32))
SETTINGS = UpdateSettings(0.1, 0.01, 0.9, 0.99, 1e-6)
FIRST_ORDER = FilterCoefficients((0.2, 0.3), (-0.5,), 0.7)


def make_slots(sizes: list[int], dtype: str, rule: str, order: int, displacement: bool) -> list[Slot]:
    rng = np.random.default_rng(sum(sizes))
    slots, first = [], 0
    for size in sizes:
        draw = [rng.normal(size=size).astype(dtype) for _ in range(2 + order + UPDATE_RULES[rule])]
        moments = tuple(np.abs(m) for m in draw[2 + order :])
        moved = np.full(size, np.nan, dtype) if displacement else None
        slots.append(Slot(draw[0], draw[1], first, tuple(draw[2 : 2 + order]), moments, moved))
        first += -(-max(size, 1) // 4096) * 4096
    return slots


def copied(slots: list[Slot]) -> list[Slot]:
    def copy(value):
        return tuple(v.copy() for v in value) if isinstance(value, tuple) else None if value is None else value.copy()

    return [
        Slot(copy(s.parameter), copy(s.total), s.first, copy(s.filter_state), copy(s.moments), copy(s.displacement))
        for s in slots
    ]


def compose(slots: list[Slot], noise: NoiseRow, coefficients: FilterCoefficients, rule: str, number: int) -> None:
    for slot in slots:
        z = backend.normal(KEY, noise.row, noise.stream, slot.first, slot.total.size, dtype=slot.total.dtype.name)
        y = backend.recurrence((slot.total + noise.scale * z) / 32, slot.filter_state, coefficients)
        before = slot.parameter.copy()
        backend.update(rule, slot.parameter, y, slot.moments, SETTINGS, number)
        if slot.displacement is not None:
            slot.displacement[...] = slot.parameter - before


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_step_is_its_composition(dtype: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [1, 0, 4095, 4097, 64 * 4096 + 5, 2 * 64 * 4096]
    noise = NoiseRow(KEY, 6, 0, 2.5)
    expected = make_slots(sizes, dtype, rule, 1, displacement=True)
    runs = [copied(expected) for _ in range(2)]
    compose(expected, noise, FIRST_ORDER, rule, 3)
    for threads, slots in zip((1, 2), runs, strict=True):
        monkeypatch.setattr(sys.modules["dpcore_numpy.step"], "THREADS", threads)
        totals = [slot.total.copy() for slot in slots]
        for slot in slots:
            slot.total.flags.writeable = False
        backend.step(slots, noise, 32, FIRST_ORDER, rule, [SETTINGS] * len(sizes), 3)
        for got, wanted, total in zip(slots, expected, totals, strict=True):
            assert got.parameter.tobytes() == wanted.parameter.tobytes()
            assert got.displacement.tobytes() == wanted.displacement.tobytes()
            for mine, theirs in zip((*got.filter_state, *got.moments), (*wanted.filter_state, *wanted.moments)):
                assert mine.tobytes() == theirs.tobytes()
            assert got.total.tobytes() == total.tobytes()


def test_the_injected_noise_has_the_right_scale() -> None:
    """Sum 0, learning rate 1: the parameters move by exactly scale * z / batch_size."""
    size, scale, batch_size = 200_000, 3.0, 50.0
    slot = Slot(np.zeros(size, np.float32), np.zeros(size, np.float32), 0)
    backend.step(
        [slot], NoiseRow(KEY, 0, 0, scale), batch_size, FilterCoefficients((1.0,), ()), "sgd", [UpdateSettings(1.0)], 1
    )
    relative = slot.parameter.std() / (scale / batch_size)
    assert abs(relative - 1) < 5 / np.sqrt(2 * size)


def test_no_noise_is_drawn_at_scale_zero() -> None:
    slot = Slot(np.zeros(10), np.ones(10), 0)
    backend.step([slot], NoiseRow(KEY, 0, 0, 0.0), 2, FilterCoefficients((1.0,), ()), "sgd", [UpdateSettings(1.0)], 1)
    assert (slot.parameter == -0.5).all()


def test_nothing_is_changed_by_a_refused_step() -> None:
    good, bad = make_slots([10, 10], "float32", "adam", 1, displacement=False)
    bad = Slot(bad.parameter, bad.total.astype(np.float64), 4096, bad.filter_state, bad.moments)
    before = good.parameter.copy()
    with pytest.raises(ArgumentTypeError, match="dtype"):
        backend.step([good, bad], NoiseRow(KEY, 0, 0, 1.0), 1, FIRST_ORDER, "adam", [SETTINGS] * 2, 1)
    assert (good.parameter == before).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": float("nan")}, "batch_size=nan"),
        ({"noise": NoiseRow(KEY, 0, 0, -1.0)}, "noise_scale=-1.0"),
        ({"noise": NoiseRow(KEY, 0, 0, float("inf"))}, "noise_scale=inf"),
        ({"settings": []}, "len(settings)=0"),
        ({"step_number": 0}, "step_number=0"),
    ],
)
def test_bad_calls(change: dict, words: str) -> None:
    arguments = {
        "slots": make_slots([4], "float32", "sgd", 1, displacement=False),
        "noise": NoiseRow(KEY, 0, 0, 1.0),
        "batch_size": 4,
        "coefficients": FIRST_ORDER,
        "rule": "sgd",
        "settings": [SETTINGS],
        "step_number": 1,
    }
    with pytest.raises(ArgumentError) as caught:
        backend.step(**(arguments | change))
    assert words in str(caught.value)


def test_arrays_changed_in_place_must_be_contiguous() -> None:
    slot = Slot(np.zeros(20, np.float32)[::2], np.zeros(10, np.float32), 0)
    with pytest.raises(ArgumentTypeError, match="contiguous"):
        backend.step([slot], NoiseRow(KEY, 0, 0, 1.0), 1, FilterCoefficients((1.0,), ()), "sgd", [SETTINGS], 1)
