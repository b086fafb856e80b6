"""The fused step is the composition of the plain operations, whatever the threads and the pieces."""

import copy
import re
from collections.abc import Sequence

import numpy as np
import pytest

import dpcore_numpy as backend
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.check import order_of
from dpcore.spec.grid import step_of
from dpcore.spec.ops import (
    SECOND_MOMENT,
    UPDATE_RULES,
    FilterCoefficients,
    NoiseRow,
    RingCoefficients,
    Slot,
    UpdateSettings,
)
from tests.refused import refused

KEY = bytes(range(32))
UNIT = 2.5 * 2.0**-33
SETTINGS = UpdateSettings(0.1, 0.01, 0.9, 0.99, 1e-6, 0.02, 0.1, 3.0, 0.25)
FIRST_ORDER = FilterCoefficients((0.2, 0.3), (-0.5,), 0.7)
NOISE_ORDER_1 = FilterCoefficients((1.0, 0.3), (-0.5,), 0.7)


def make_slots(
    sizes: list[int], dtype: str, rule: str, order: int, displacement: bool, noise_order: int = 0, scaled: bool = False,
) -> list[Slot]:  # fmt: skip
    rng = np.random.default_rng(sum(sizes))
    slots, first = [], 0
    for size in sizes:
        draw = [rng.normal(size=size).astype(dtype) for _ in range(4 + order + UPDATE_RULES[rule] + noise_order)]
        moments = tuple(np.abs(m) for m in draw[4 + order : 4 + order + UPDATE_RULES[rule]])
        slots.append(Slot(
            parameter=draw[0], total=np.rint(draw[1].astype(np.float64) / UNIT), first=first, moments=moments,
            filter_state=tuple(draw[4 : 4 + order]),
            noise_state=tuple(v.astype(np.float64) for v in draw[4 + order + UPDATE_RULES[rule] :]),
            displacement=np.full(size, np.nan, dtype) if displacement else None,
            scale=np.abs(draw[2]) + np.asarray(0.1, dtype) if scaled else None,
            square=draw[3] if rule in SECOND_MOMENT else None,
        ))  # fmt: skip
        first += -(-max(size, 1) // 4096) * 4096
    return slots


def compose(
    slots: list[Slot], noise: NoiseRow, filters: Sequence[FilterCoefficients], rule: str, number: int,
    correlation: FilterCoefficients | RingCoefficients | None = None, square: str = "filtered",
    square_noise: NoiseRow | None = None, unit: float = UNIT,
) -> None:  # fmt: skip
    """`Backend.step` as its docstring has it, on whole arrays."""

    def normals(slot: Slot, noise: NoiseRow) -> np.ndarray:
        place = (slot.first, slot.total.size)
        return backend.normal(noise.key, noise.row, noise.stream, *place, bits=noise.bits, rng=noise.rng)

    for slot in slots:
        dtype, m = slot.parameter.dtype, normals(slot, noise)
        if correlation is not None:
            m = backend.correlate(m, slot.noise_state, correlation, bits=noise.bits)
        divided = 1 if slot.scale is None else slot.scale
        g = ((slot.total + m * 2.0**noise.bits) * (unit / 32)).astype(dtype) / divided
        y, states = g, list(slot.filter_state)
        for coefficients in filters:
            own, states = states[: order_of(coefficients)], states[order_of(coefficients) :]
            y = backend.recurrence(y, own, coefficients)
        h = {"filtered": None, "released": g**2, "given": slot.square}.get(square)
        if square == "separate":
            h = (slot.total * (unit / 32) / divided) ** 2
            if square_noise is not None:
                u = square_noise.scale * 2.0**-square_noise.bits
                h = (np.rint(h * (1 / u)) + normals(slot, square_noise) * 2.0**square_noise.bits) * u
            h = h.astype(dtype)
        before = slot.parameter.copy()
        backend.update(rule, slot.parameter, y, slot.moments, SETTINGS, number, h)
        if slot.displacement is not None:
            slot.displacement[...] = slot.parameter - before


SIZES = [1, 0, 4095, 4097, 16 * 4096 + 5, 2 * 16 * 4096]
RING = RingCoefficients((0.5, -0.25, 0.125), 1, 0.75)
FIR = FilterCoefficients((0.5, 0.25, 0.125), ())
NOISE_FIR = FilterCoefficients((1.0, 0.25, 0.125), ())
SEPARATE = NoiseRow(bytes(range(1, 33)), 6, 3, 0.5, "philox", 30)
PLAIN = [(rule, (FIRST_ORDER,), {}) for rule in UPDATE_RULES]
EXTENDED = [
    ("sgd", (), {}), ("sgd", (FIR, FIRST_ORDER), {"correlation": NOISE_ORDER_1}),
    ("accelerated", (FIRST_ORDER,), {"correlation": NOISE_FIR}),
    ("adam", (FIRST_ORDER, FIR), {"square": "released", "correlation": NOISE_FIR}),
    ("adamw", (FIR,), {"square": "given"}),
    ("adam", (), {"square": "separate"}),
    ("adagrad", (FIRST_ORDER,), {"square": "separate", "square_noise": SEPARATE}),
    ("adam", (FIR, FIR), {"square": "separate", "square_noise": SEPARATE, "correlation": NOISE_ORDER_1}),
    ("sgd", (), {"correlation": RING}), ("adam", (FIRST_ORDER,), {"correlation": RING._replace(keeps="input")}),
    ("momentum", (), {"correlation": RingCoefficients((), 0, 0.5)}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("rule", "filters", "options"), [*PLAIN, *EXTENDED])
def test_step_is_its_composition(dtype: str, rule: str, filters: tuple, options: dict):
    noise = NoiseRow(KEY, 6, 0, 2.5, bits=33)
    chosen = options.get("correlation", RingCoefficients((), 0))
    noise_order = len(chosen.weights) if isinstance(chosen, RingCoefficients) else order_of(chosen)
    order = sum(map(order_of, filters))
    scaled = bool(options)
    expected = make_slots(SIZES, dtype, rule, order, True, noise_order, scaled)
    # Slots with and without a scale take part in one step.
    expected[::2] = [slot._replace(scale=None) for slot in expected[::2]]
    slots = copy.deepcopy(expected)
    unit = step_of(noise.scale, noise.bits, options["correlation"].normalizer if "correlation" in options else 1.0)
    compose(expected, noise, filters, rule, 3, unit=unit, **options)
    read = [(slot.total.copy(), copy.copy(slot.scale), copy.copy(slot.square)) for slot in slots]
    for slot in slots:
        slot.total.flags.writeable = False
    backend.step(slots, noise, 32, filters, rule, [SETTINGS] * len(SIZES), 3, unit=unit, **options)
    for got, wanted, before in zip(slots, expected, read, strict=True):
        assert got.parameter.tobytes() == wanted.parameter.tobytes()
        assert got.displacement.tobytes() == wanted.displacement.tobytes()
        for name in ("filter_state", "moments", "noise_state"):
            for mine, theirs in zip(getattr(got, name), getattr(wanted, name), strict=True):
                assert mine.tobytes() == theirs.tobytes(), name
        for mine, old in zip((got.total, got.scale, got.square), before, strict=True):
            assert (mine is old is None) or mine.tobytes() == old.tobytes()


def test_the_noise_state_rests_where_no_noise_is_drawn() -> None:
    (slot,) = make_slots([10], "float32", "sgd", 0, displacement=False, noise_order=1)
    before = slot.noise_state[0].copy()
    for correlation in (NOISE_ORDER_1, RingCoefficients((0.5,), 0)):
        backend.step([slot], NoiseRow(KEY, 0, 0, 0.0), 1, (), "sgd", [SETTINGS], 1, unit=UNIT, correlation=correlation)
        np.testing.assert_array_equal(slot.noise_state[0], before)


def test_a_release_is_an_integer_of_the_grid_whatever_the_sum() -> None:
    """float64 parameters, so that nothing rounds after it: what moves them is ``k g / batch`` with k an integer."""
    noise, total = NoiseRow(KEY, 0, 0, 0.75, bits=30), np.rint(np.random.default_rng(1).normal(size=1000) * 2.0**40)
    for correlation in (None, NOISE_ORDER_1):
        state = () if correlation is None else (np.random.default_rng(2).normal(size=1000),)
        slot = Slot(np.zeros(1000), total, 0, noise_state=state)
        step = 0.75 * 2.0**-30 / (0.7 if correlation else 1.0)
        backend.step([slot], noise, 4.0, (), "sgd", [UpdateSettings(1.0)], 1, unit=step, correlation=correlation)
        factor = step / 4
        released = -slot.parameter
        integers = np.rint(released / factor)
        assert np.array_equal(released, integers * factor)
        # It is the sum, and the noise is what `normal` and `correlate` say.
        again = (np.random.default_rng(2).normal(size=1000),)
        m = backend.normal(KEY, 0, 0, 0, 1000, bits=30)
        m = m if correlation is None else backend.correlate(m, again, correlation, bits=30)
        np.testing.assert_array_equal(integers, total + m * 2.0**30)


def test_no_noise_is_drawn_at_scale_zero() -> None:
    slot = Slot(np.zeros(10), np.ones(10), 0)
    backend.step([slot], NoiseRow(KEY, 0, 0, 0.0), 2, (), "sgd", [UpdateSettings(1.0)], 1, unit=0.5)
    assert (slot.parameter == -0.25).all()


def test_nothing_is_changed_by_a_refused_step() -> None:
    good, bad = make_slots([10, 10], "float32", "adam", 1, displacement=False)
    bad = Slot(bad.parameter, bad.total.astype(np.float32), 4096, bad.filter_state, bad.moments)
    before = good.parameter.copy()
    rest = (1, (FIRST_ORDER,), "adam", [SETTINGS] * 2, 1)
    refused(ArgumentTypeError, "dtype", backend.step, [good, bad], NoiseRow(KEY, 0, 0, 1.0), *rest, unit=2.0**-36)
    assert (good.parameter == before).all()


@pytest.mark.parametrize(("change", "words"), [
    ({"batch_size": 0}, "batch_size=0"), ({"unit": 0.0}, "unit=0.0"),
    ({"unit": 2.0**-35}, "unit=2.9103830456733704e-11: must be 1.4551915228366852e-11, the step of the noise's grid"),
    ({"batch_size": float("nan")}, "batch_size=nan"),
    ({"noise": NoiseRow(KEY, 0, 0, -1.0)}, "noise_scale=-1.0"),
    ({"noise": NoiseRow(KEY, 0, 0, float("inf"))}, "noise_scale=inf"), ({"settings": []}, "len(settings)=0"),
    ({"step_number": 0}, "step_number=0"), ({"filters": ()}, "len(slots[0].filter_state)=1: must be 0"),
    ({"filters": (FIRST_ORDER, FIRST_ORDER)}, "len(slots[0].filter_state)=1: must be 2"),
    ({"correlation": NOISE_ORDER_1}, "len(slots[0].noise_state)=0: must be 1, the order of the recurrence"),
    ({"correlation": FIRST_ORDER}, "b=(0.2, 0.3): must begin with 1 if noise is correlated"),
    ({"correlation": RING}, "len(slots[0].noise_state)=0: must be 3"),
    ({"noise": NoiseRow(KEY, 0, 0, 1.0, bits=37)}, "bits=37: must be from 0 to 36"),
    ({"correlation": RingCoefficients((), 1)}, "place=1: must be less than 0, the number of weights of the ring"),
    ({"correlation": RING._replace(place=3)}, "place=3: must be less than 3"),
    ({"correlation": RING._replace(place=-1)}, "place=-1"), ({"correlation": RING._replace(keeps="x")}, "keeps='x'"),
    ({"square": "squared"}, "square='squared'"),
    ({"square": "released"}, "square='released': must be 'filtered' for rule='sgd'"),
    ({"square_noise": NoiseRow(KEY, 1, 0, 1.0)}, "square_noise: must be None for square='filtered'"),
])  # fmt: skip
def test_bad_calls(change: dict, words: str) -> None:
    slots, noise = make_slots([4], "float32", "sgd", 1, displacement=False), NoiseRow(KEY, 0, 0, 1.0)
    arguments = {"slots": slots, "noise": noise, "batch_size": 4, "filters": (FIRST_ORDER,), "rule": "sgd",
                 "settings": [SETTINGS], "step_number": 1, "unit": 2.0**-36}  # fmt: skip
    refused(ArgumentError, re.escape(words), backend.step, **(arguments | change))


def test_arrays_changed_in_place_must_be_contiguous() -> None:
    slot = Slot(np.zeros(20, np.float32)[::2], np.zeros(10), 0)
    with pytest.raises(ArgumentTypeError, match="contiguous"):
        backend.step([slot], NoiseRow(KEY, 0, 0, 1.0), 1, (), "sgd", [SETTINGS], 1, unit=2.0**-36)
