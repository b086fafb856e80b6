"""Filter, update and the fused step: Triton's kernels against the NumPy reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import (
    assert_agree,
    chains,
    correlated,
    correlations,
    few,
    fewer,
    fewest,
    filters,
    floats,
    grids,
    keys,
    noise_rows,
    rates,
    recurrence_terms,
    rngs,
    seeds,
    small_sizes,
    update_terms,
    writable,
)

import dpcore_numpy as reference
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.check import order_of
from dpcore.spec.contributions import rounding_of_rows
from dpcore.spec.grid import nearest, released, step_of
from dpcore.spec.ops import (
    KEPT,
    SECOND_MOMENT,
    SQUARES,
    UPDATE_RULES,
    FilterCoefficients,
    NoiseRow,
    RingCoefficients,
    Slot,
    UpdateSettings,
)
from tests.refused import refused

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

orders = st.integers(0, 3)
rules = st.sampled_from(sorted(UPDATE_RULES))
step_numbers = st.sampled_from([1, 2, 1000])


def moments_of(rng: np.random.Generator, rule: str, size: int, special: bool) -> tuple[np.ndarray, ...]:
    """State of an update rule. One in ten second moments is negative: "separate" squares make them so."""
    vectors = [writable(floats(rng, size, special=special)) for _ in range(UPDATE_RULES[rule])]
    if rule in SECOND_MOMENT:
        second = vectors[SECOND_MOMENT[rule]]
        second[...] = np.where(rng.random(size) < 0.9, np.abs(second), second)
    return tuple(vectors)


@few
@given(st.data(), seeds, orders, small_sizes, st.booleans())
def test_recurrences_agree(backend: Any, data: st.DataObject, seed: int, order: int, size: int, special: bool) -> None:
    rng, coefficients = np.random.default_rng(seed), data.draw(filters(order))
    x, state = floats(rng, size, special=special), [writable(floats(rng, size, special=special)) for _ in range(order)]
    sent, sent_state = backend.from_numpy(x), [backend.from_numpy(vector) for vector in state]
    y_terms, state_terms = recurrence_terms(x, state, coefficients)
    with np.errstate(all="ignore"):
        y = reference.recurrence(x, state, coefficients)
    assert_agree("recurrence", backend.to_numpy(backend.recurrence(sent, sent_state, coefficients)), y, y_terms)
    for got, expected, terms in zip(sent_state, state, state_terms, strict=True):
        assert_agree("recurrence", backend.to_numpy(got), expected, terms)
    np.testing.assert_array_equal(backend.to_numpy(sent), x)


def noise_order_of(correlation: FilterCoefficients | RingCoefficients | None) -> int:
    if correlation is None:
        return 0
    return len(correlation.weights) if isinstance(correlation, RingCoefficients) else order_of(correlation)


def unit_of(noise: NoiseRow, correlation: FilterCoefficients | RingCoefficients | None = None) -> float:
    """The grid's step as a run chooses it, and any where there is no noise."""
    return step_of(noise.scale or 0.3, noise.bits, 1.0 if correlation is None else correlation.normalizer)


def noise_states(rng: np.random.Generator, count: int, size: int) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal(size) for _ in range(count))


@few
@given(correlated, seeds, small_sizes, grids)
@example(RingCoefficients((0.5, -0.25, 0.75), 2, 0.7, "output"), 1, 257, 36)
@example(RingCoefficients((0.5, -0.25, 0.75), 0, 0.7, "input"), 2, 1025, 30)
@example(FilterCoefficients((1.0, 0.5, 0.25), (-0.3, 0.2), 0.7), 3, 257, 36)
@example(FilterCoefficients((1.0,), (-0.5,), 1.0), 4, 257, 12)
def test_correlated_noise_has_the_same_bits(backend: Any, coefficients: Any, seed: int, size: int, bits: int) -> None:
    """Several steps, from any place of a ring: every vector, and of a ring only one a step is written."""
    rng, ring = np.random.default_rng(seed), isinstance(coefficients, RingCoefficients)
    state = noise_states(rng, noise_order_of(coefficients), size)
    sent_state = [backend.from_numpy(vector) for vector in state]
    for step in range(2):
        z, before = np.floor(rng.standard_normal(size) * 2.0**bits) * 2.0**-bits, [vector.copy() for vector in state]
        if ring:
            coefficients = coefficients._replace(place=(coefficients.place + step) % max(len(state), 1))
        sent = backend.from_numpy(z)
        m = reference.correlate(z, state, coefficients, bits=bits)
        assert_agree("correlate", backend.to_numpy(backend.correlate(sent, sent_state, coefficients, bits=bits)), m)
        np.testing.assert_array_equal(m, np.rint(m * 2.0**bits) * 2.0**-bits)
        if state:
            np.testing.assert_array_equal(backend.to_numpy(sent), z)
        for place, (got, expected, old) in enumerate(zip(sent_state, state, before, strict=True)):
            assert_agree("correlate", backend.to_numpy(got), expected)
            if ring and place != coefficients.place:
                np.testing.assert_array_equal(expected, old)


@pytest.mark.parametrize("coefficients", [RingCoefficients((0.5,), 0), FilterCoefficients((1.0, 0.5), ())])
def test_noise_that_lies_column_by_column_meets_its_own_states(backend: Any, coefficients: Any) -> None:
    z, kept = np.arange(6.0).reshape(3, 2), np.arange(6.0, 12.0).reshape(3, 2)
    state = backend.from_numpy(kept)
    m = backend.correlate(backend.from_numpy(z.T).T, [state], coefficients)
    assert_agree("correlate", backend.to_numpy(m), reference.correlate(z, [kept], coefficients))
    assert_agree("correlate", backend.to_numpy(state), kept)


@pytest.mark.parametrize("rule", sorted(UPDATE_RULES))
@few
@given(seeds, rates, step_numbers, small_sizes, st.booleans(), st.booleans())
@example(1, UpdateSettings(0.1, 0.0, 0.9, 0.99, 1e-3), 2, 257, False, False)
@example(1, UpdateSettings(0.1, 0.01, 0.9, 0.99, 1e-3), 2, 257, False, False)
def test_updates_agree(
    backend: Any, rule: str, seed: int, settings: UpdateSettings, number: int, size: int,
    special: bool, squared: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    x, g = writable(floats(rng, size, special=special)), floats(rng, size, special=special)
    moments = moments_of(rng, rule, size, special)
    square = floats(rng, size, special=special) if squared and rule in SECOND_MOMENT else None
    sent, direction, sent_moments = backend.from_numpy(x), backend.from_numpy(g), list(map(backend.from_numpy, moments))
    sent_square = None if square is None else backend.from_numpy(square)
    square_terms = None if square is None else np.abs(square).astype(np.float64)
    x_terms, moment_terms = update_terms(rule, x, g, g, moments, settings, number, square, square_terms)
    with np.errstate(all="ignore"):
        reference.update(rule, x, g, moments, settings, number, square)
    backend.update(rule, sent, direction, sent_moments, settings, number, sent_square)
    assert_agree("update", backend.to_numpy(sent), x, x_terms)
    for got, expected, terms in zip(sent_moments, moments, moment_terms, strict=True):
        assert_agree("update", backend.to_numpy(got), expected, terms)
    np.testing.assert_array_equal(backend.to_numpy(direction), g)
    if square is not None:
        np.testing.assert_array_equal(backend.to_numpy(sent_square), square)


NO_DENOMINATOR = [UpdateSettings(1.0), UpdateSettings(1.0, bias=4.0), UpdateSettings(1.0, eps=1e-60)]


@pytest.mark.parametrize("settings", NO_DENOMINATOR)
@pytest.mark.parametrize("rule", sorted(SECOND_MOMENT))
def test_a_denominator_of_zero_moves_nothing(backend: Any, rule: str, settings: UpdateSettings) -> None:
    """Also where eps is 0 in float32 only; a NaN still shows, in both."""
    x = np.float32([1, 2, 3, 4])
    square = np.float32([0, settings.bias / 2, -1, np.nan])
    moments = [np.zeros(4, np.float32) for _ in range(UPDATE_RULES[rule])]
    sent, sent_moments = backend.from_numpy(x), list(map(backend.from_numpy, moments))
    ones = np.ones(4, np.float32)
    backend.update(rule, sent, backend.from_numpy(ones), sent_moments, settings, 1, backend.from_numpy(square))
    reference.update(rule, x, ones, moments, settings, 1, square)
    for result in (x, backend.to_numpy(sent)):
        np.testing.assert_array_equal(result, np.float32([1, 2, 3, np.nan]))


def test_plain_operations_take_views(backend: Any) -> None:
    rng = np.random.default_rng(3)
    x, s, g = floats(rng, 6, 5), writable(floats(rng, 6, 5)), floats(rng, 6, 5)
    transposed = [backend.from_numpy(np.ascontiguousarray(array.T)).T for array in (x, s, g)]
    coefficients = FilterCoefficients((0.5, 0.25), (-0.5,))
    y = backend.recurrence(transposed[0], [transposed[1]], coefficients)
    np.testing.assert_allclose(backend.to_numpy(y), reference.recurrence(x, [s], coefficients), rtol=1e-6)
    np.testing.assert_allclose(backend.to_numpy(transposed[1]), s, rtol=1e-5, atol=1e-5)
    settings, m = UpdateSettings(0.1, beta1=0.5), np.zeros((6, 5), dtype=np.float32)
    sent_m = backend.from_numpy(m)
    backend.update("momentum", transposed[1], transposed[2], [sent_m], settings, 1)
    reference.update("momentum", s, g, [m], settings, 1)
    np.testing.assert_allclose(backend.to_numpy(transposed[1]), s, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(backend.to_numpy(sent_m), m, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------- the fused step


def slots_of(
    rng: np.random.Generator, sizes: list[int], order: int, rule: str, displaced: bool, special: bool,
    noise_order: int = 0, scaled: bool = False, squared: bool = False,
) -> list[Slot[np.ndarray]]:  # fmt: skip
    """Tensors laid out as a run would; the last one is a shard that begins inside a tile."""
    slots, first = [], 0
    for index, size in enumerate(sizes):
        shard = 1003 if index == len(sizes) - 1 else 0
        slots.append(Slot(
            parameter=writable(floats(rng, size, special=special)),
            total=floats(rng, size, special=special).astype(np.float64), first=first + shard,
            filter_state=tuple(writable(floats(rng, size)) for _ in range(order)),
            moments=moments_of(rng, rule, size, False),
            displacement=np.full(size, np.nan, dtype=np.float32) if displaced else None,
            noise_state=noise_states(rng, noise_order, size),
            scale=np.abs(floats(rng, size)) + np.float32(0.01) if scaled else None,
            square=floats(rng, size, special=special) if squared else None,
        ))  # fmt: skip
        first += 4096 * (2 + (size + shard) // 4096)
    return slots


def mapped(slot: Slot[Any], change: Callable[[Any], Any]) -> Slot[Any]:
    arrays = {name: value for name, value in slot._asdict().items() if name != "first"}
    return slot._replace(**{
        name: tuple(map(change, value)) if isinstance(value, tuple) else None if value is None else change(value)
        for name, value in arrays.items()
    })  # fmt: skip


def step_terms(
    slot: Slot[np.ndarray], noise: NoiseRow, batch: float, filters: Sequence[FilterCoefficients], rule: str,
    settings: UpdateSettings, number: int, *, unit: float, correlation: Any = None, square: str = "filtered",
    square_noise: NoiseRow | None = None,
) -> Slot[Any]:  # fmt: skip
    """Terms of every array that a step changes, composed as the step is. What is released has the same bits."""
    state = list(map(writable, slot.noise_state))
    with np.errstate(all="ignore"):
        g = slot.total * (unit / batch)
        if noise.scale:
            m = normals_of(slot, noise)
            if correlation is not None:
                m = reference.correlate(m, state, correlation, bits=noise.bits)
            g = released(slot.total, m, noise.bits, unit / batch)
        divisor = 1.0 if slot.scale is None else slot.scale.astype(np.float64)
        g = g / divisor
        y, y_terms, state_terms = g, np.abs(g), []
        for coefficients in filters:
            done = len(state_terms)
            own = slot.filter_state[done : done + order_of(coefficients)]
            y_terms, terms = recurrence_terms(y_terms, own, coefficients)
            y = reference.recurrence(y, [v.astype(np.float64) for v in own], coefficients)
            state_terms += terms
        q, z = slot.total * (unit / batch) / divisor, np.zeros(slot.total.shape)
        if square_noise is not None and square_noise.scale:
            z = square_noise.scale * (normals_of(slot, square_noise) + 2.0**-square_noise.bits)
        h, h_terms = {
            "filtered": lambda: (None, None),
            "released": lambda: (g**2, g**2),
            "separate": lambda: (q**2 + z, q**2 + np.abs(z)),
            "given": lambda: (slot.square, np.abs(slot.square).astype(np.float64)),
        }[square]()
    x_terms, moment_terms = update_terms(rule, slot.parameter, y, y_terms, slot.moments, settings, number, h, h_terms)
    return slot._replace(
        parameter=x_terms, filter_state=tuple(state_terms), moments=tuple(moment_terms),
        displacement=None if slot.displacement is None else x_terms,
    )  # fmt: skip


def normals_of(slot: Slot[np.ndarray], noise: NoiseRow) -> np.ndarray:
    key, row, stream, _, rng, bits = noise
    return reference.normal(key, row, stream, slot.first, slot.total.size, bits=bits, rng=rng)


def changed(slot: Slot[Any]) -> list[Any]:
    displacement = () if slot.displacement is None else (slot.displacement,)
    return [slot.parameter, *slot.filter_state, *slot.moments, *displacement]


def assert_steps_agree(
    backend: Any, slots: Sequence[Slot[np.ndarray]], arguments: Sequence[Any], settings: Sequence[UpdateSettings],
    number: int, **options: Any,
) -> None:  # fmt: skip
    """One step of both backends: what changes agrees, and what is read stays."""
    unit = unit_of(arguments[0], options.get("correlation"))
    slots, options = [on_grid(slot, unit) for slot in slots], {**options, "unit": unit}
    terms = [
        step_terms(slot, *arguments, numbers, number, **options) for slot, numbers in zip(slots, settings, strict=True)
    ]
    sent = [mapped(slot, backend.from_numpy) for slot in slots]
    with np.errstate(all="ignore"):
        reference.step(slots, *arguments, settings, number, **options)
    backend.step(sent, *arguments, settings, number, **options)
    for got, expected, allowed in zip(sent, slots, terms, strict=True):
        for ours, theirs, bound in zip(changed(got), changed(expected), changed(allowed), strict=True):
            assert_agree("step", backend.to_numpy(ours), theirs, bound)
        for ours, theirs in zip(got.noise_state, expected.noise_state, strict=True):
            assert_agree("correlate", backend.to_numpy(ours), theirs)
        for read in ("total", "scale", "square"):
            if getattr(got, read) is not None:
                np.testing.assert_array_equal(backend.to_numpy(getattr(got, read)), getattr(expected, read))


def on_grid(slot: Slot[np.ndarray], unit: float) -> Slot[np.ndarray]:
    """The slot with its sum in integers."""
    return slot._replace(total=np.rint(slot.total / unit))


@dataclass(frozen=True)
class Kind:
    """What a step is made of, besides its numbers."""

    rule: str
    filters: tuple[FilterCoefficients, ...]
    correlation: FilterCoefficients | RingCoefficients | None
    square: str
    square_noise: NoiseRow | None
    scaled: bool
    displaced: bool

    def slots(self, rng: np.random.Generator, sizes: list[int], special: bool) -> list[Slot[np.ndarray]]:
        order = sum(map(order_of, self.filters))
        noise_order, squared = noise_order_of(self.correlation), self.square == "given"
        return slots_of(rng, sizes, order, self.rule, self.displaced, special, noise_order, self.scaled, squared)

    def options(self) -> dict[str, Any]:
        return {"correlation": self.correlation, "square": self.square, "square_noise": self.square_noise}


@st.composite
def kinds(draw: st.DrawFn, square: str, scale: float) -> Kind:
    rule = draw(rules if square == "filtered" else st.sampled_from(sorted(SECOND_MOMENT)))
    square_noise = None
    if square == "separate" and draw(st.integers(0, 3)):
        scale = draw(st.sampled_from([scale, scale, 0.0]))
        square_noise = NoiseRow(draw(keys), draw(noise_rows), 2, scale, draw(rngs), draw(grids))
    filters, correlation = tuple(draw(chains)), draw(correlations)
    return Kind(rule, filters, correlation, square, square_noise, *(draw(st.booleans()) for _ in range(2)))


@pytest.mark.parametrize("square", SQUARES)
@fewest
@given(
    st.data(), seeds, st.lists(st.sampled_from([0, 1, 17, 4096, 5000]), min_size=1, max_size=3),
    st.sampled_from([0.0, 3.0, 3.0]), noise_rows, keys, rngs, grids, step_numbers, st.booleans(),
)  # fmt: skip
def test_steps_agree(
    backend: Any, square: str, data: st.DataObject, seed: int, sizes: list[int], scale: float, row: int, key: bytes,
    rng: str, bits: int, number: int, special: bool,
) -> None:  # fmt: skip
    kind, settings = data.draw(kinds(square, 0.7)), data.draw(st.lists(rates, min_size=len(sizes), max_size=len(sizes)))
    slots = kind.slots(np.random.default_rng(seed), sizes, special)
    arguments = (NoiseRow(key, row, 0, scale, rng, bits), 7.0, kind.filters, kind.rule)
    assert_steps_agree(backend, slots, arguments, settings, number, **kind.options())


@pytest.mark.parametrize("square", SQUARES)
@fewest
@given(st.data(), seeds, noise_rows)
def test_a_step_is_the_composition_of_the_plain_operations(
    backend: Any, square: str, data: st.DataObject, seed: int, row: int
):
    check_composition(backend, data.draw(kinds(square, 0.5)), data.draw(rates), seed, row)


@pytest.mark.parametrize(("rule", "rng"), [(rule, "philox") for rule in SECOND_MOMENT] + [("adam", "chacha20")])
def test_a_step_of_everything_is_its_composition(backend: Any, rule: str, rng: str) -> None:
    first_order, fir = FilterCoefficients((0.2, 0.3), (-0.5,), 0.7), FilterCoefficients((0.5, 0.25, 0.125), ())
    square_noise = NoiseRow(bytes(range(1, 33)), 3, 2, 0.25, rng)
    settings = UpdateSettings(0.1, 0.01, 0.9, 0.99, 0.0, 0.02, 0.1)
    correlation = first_order._replace(b=(1.0, 0.3))
    kind = Kind(rule, (first_order, fir), correlation, "separate", square_noise, True, True)
    check_composition(backend, kind, settings, 1, 2**32 - 1)
    if (rule, rng) == ("adam", "philox"):
        for place, keeps in enumerate(KEPT):
            ring = RingCoefficients((0.5, -0.25, 0.75), place, 0.7, keeps)
            check_composition(backend, replace(kind, correlation=ring), settings, 1, 2**32 - 1)


def check_composition(backend: Any, kind: Kind, numbers: UpdateSettings, seed: int, row: int) -> None:
    """Bit for bit: the same functions on the same numbers. (The batch size is a power of two: a product is as good.)"""
    noise = NoiseRow(bytes(range(32)), row, 1, 1.7, "philox", 33)
    unit = unit_of(noise, kind.correlation)
    slot = on_grid(kind.slots(np.random.default_rng(seed), [4100], False)[0], unit)
    fused, plain = mapped(slot, backend.from_numpy), mapped(slot, backend.from_numpy)
    backend.step([fused], noise, 8.0, kind.filters, kind.rule, [numbers], 3, unit=unit, **kind.options())

    def scaled(average: Any) -> Any:
        return average if plain.scale is None else average / plain.scale

    m = backend.normal(noise.key, row, 1, slot.first, 4100, bits=33, rng="philox")
    if kind.correlation is not None:
        m = backend.correlate(m, plain.noise_state, kind.correlation, bits=33)
    g = scaled(released(plain.total, m, 33, unit / 8.0).float())
    y, states = g, list(plain.filter_state)
    for coefficients in kind.filters:
        own, states = states[: order_of(coefficients)], states[order_of(coefficients) :]
        y = backend.recurrence(y, own, coefficients)
    h = {"filtered": None, "released": g * g, "given": plain.square}.get(kind.square)
    if kind.square == "separate":
        h = scaled(plain.total * (unit / 8.0)) ** 2
        if kind.square_noise is not None and kind.square_noise.scale:
            key, other, stream, scale, rng, bits = kind.square_noise
            z, u = backend.normal(key, other, stream, slot.first, 4100, bits=bits, rng=rng), step_of(scale, bits)
            h = released(nearest(h * (1 / u)), z, bits, u)
        h = h.float()
    before = plain.parameter.clone()
    backend.update(kind.rule, plain.parameter, y, plain.moments, numbers, 3, h)
    if kind.displaced:
        plain.displacement.copy_(plain.parameter - before)
    pairs = zip((*changed(fused), *fused.noise_state), (*changed(plain), *plain.noise_state), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_array_equal(backend.to_numpy(ours), backend.to_numpy(theirs))


@fewer
@given(correlations, seeds, grids, st.sampled_from([1.0, 0.3, 1e-3]), st.sampled_from([1.0, 7.0, 100.0]), rngs)
def test_what_is_released_has_the_same_bits(
    backend: Any, correlation: Any, seed: int, bits: int, scale: float, batch: float, rng: str
) -> None:
    """Parameters of 0 under "sgd" with rate 1 become the released average itself, with its sign turned."""
    draw = np.random.default_rng(seed)
    noise = NoiseRow(bytes(range(32)), 5, 0, scale, rng, bits)
    unit, total = unit_of(noise, correlation), draw.standard_normal(300) * 100 * scale
    states = noise_states(draw, noise_order_of(correlation), 300)
    slot = on_grid(Slot(np.zeros(300, np.float32), total, 4000, noise_state=states), unit)
    own = mapped(slot, backend.from_numpy)
    for step in (reference.step, backend.step):
        taken = slot if step is reference.step else own
        step([taken], noise, batch, (), "sgd", [UpdateSettings(1.0)], 1, unit=unit, correlation=correlation)
    np.testing.assert_array_equal(backend.to_numpy(own.parameter), slot.parameter)
    assert len(np.unique(slot.parameter)) > 250


def test_nothing_around_the_tensors_is_touched(backend: Any) -> None:
    """All arrays of all slots are cut out of one buffer; whatever lies between them keeps its value."""
    rng = np.random.default_rng(5)
    slots = slots_of(rng, [1, 4097, 0, 300], 2, "adam", True, False, noise_order=1, scaled=True, squared=True)
    kinds = ("float32", "float64")
    buffers = {kind: backend.from_numpy(np.full(60000, 77.0, dtype=kind)) for kind in kinds}
    taken = {kind: np.zeros(60000, dtype=bool) for kind in kinds}
    place = 5

    def cut(array: np.ndarray) -> Any:
        nonlocal place
        kind = array.dtype.name
        view = buffers[kind][place : place + array.size]
        view.copy_(backend.from_numpy(array))
        taken[kind][place : place + array.size] = True
        place += array.size + 3
        return view

    sent = [mapped(slot, cut) for slot in slots]
    totals = [backend.to_numpy(slot.total) for slot in sent]
    noise, coefficients = NoiseRow(bytes(32), 0, 0, 1.0, "philox"), FilterCoefficients((1.0, 0.5), (0.5,))
    settings = [UpdateSettings(0.1, 0.0, 0.9, 0.99, 1e-8)] * 4
    ring, filters = RingCoefficients((0.5,), 0), (coefficients, coefficients)
    for correlation in (coefficients, ring):
        options = {"unit": unit_of(noise), "correlation": correlation, "square": "given"}
        backend.step(sent, noise, 2.0, filters, "adam", settings, 1, **options)
    for kind in kinds:
        assert (backend.to_numpy(buffers[kind])[~taken[kind]] == 77).all()
    for slot, total in zip(sent, totals, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(slot.total), total)
        assert not np.isnan(backend.to_numpy(slot.displacement)).any()


def test_slots_of_different_kinds_take_part_in_one_step(backend: Any) -> None:
    """Tensors with a scale, with a displacement, with both and with none of them."""
    rng, kinds = np.random.default_rng(6), [(False, True), (True, False), (False, False), (True, True)]
    slots = [slots_of(rng, [50], 1, "adam", moved, False, 1, scaled)[0] for moved, scaled in kinds]
    slots = [slot._replace(first=4096 * index) for index, slot in enumerate(slots)]
    arguments = (NoiseRow(bytes(32), 9, 0, 1.5, "philox"), 4.0, (FilterCoefficients((0.5, 0.5), (-0.25,)),), "adam")
    settings = [UpdateSettings(0.1, 0.0, 0.9, 0.99, 1e-3), UpdateSettings(0.3, 0.01, 0.5, 0.9, 1e-2)] * 2
    correlation = FilterCoefficients((1.0, -0.5), ())
    assert_steps_agree(backend, slots, arguments, settings, 1, correlation=correlation, square="released")


@pytest.mark.parametrize("place", ["parameter", "total", "scale", "square", "noise_state", "filter_state", "moments"])
def test_a_moved_array_is_found_again(backend: Any, place: str) -> None:
    """Tables of addresses are kept from step to step; each array of a slot has its part in a table's key."""
    rng = np.random.default_rng(7)
    (slot,) = slots_of(rng, [10], 1, "adagrad", False, False, noise_order=1, scaled=True, squared=True)
    noise = NoiseRow(bytes(32), 0, 0, 1.0, "philox")
    arguments = (noise, 1.0, (FilterCoefficients((1.0, 0.5), ()),), "adagrad")
    options = {"unit": 2.0**-36, "correlation": FilterCoefficients((1.0, 0.5), ()), "square": "given"}
    slot = on_grid(slot, 2.0**-36)
    sent = mapped(slot, backend.from_numpy)
    backend.step([sent], *arguments, [UpdateSettings(1.0, eps=1.0)], 1, **options)
    slot = mapped(sent, backend.to_numpy)
    found = getattr(slot, place)
    array, moved = (found[0], getattr(sent, place)[0]) if isinstance(found, tuple) else (found, getattr(sent, place))
    array += 3 * 2.0**36 if place == "total" else 3
    old, moved.data = moved.data, backend.from_numpy(array)
    kept = backend.to_numpy(old)
    reference.step([slot], *arguments, [UpdateSettings(1.0, eps=1.0)], 2, **options)
    backend.step([sent], *arguments, [UpdateSettings(1.0, eps=1.0)], 2, **options)
    for ours, theirs in zip(changed(sent), changed(slot), strict=True):
        np.testing.assert_allclose(backend.to_numpy(ours), theirs, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(backend.to_numpy(old), kept)


def test_what_was_checked_is_checked_again_in_another_role(backend: Any) -> None:
    """The same tensors, first without a correlation or a given square, then with: they are not there."""
    ones = np.ones(10, dtype=np.float32)
    total = backend.from_numpy(np.ones(10))
    slot = Slot(backend.from_numpy(ones), total, 0, moments=(backend.from_numpy(ones),))
    arguments = ([slot], NoiseRow(bytes(32), 0, 0, 1.0), 1.0, (), "adagrad", [UpdateSettings(1.0, eps=1.0)], 1)
    backend.step(*arguments, unit=2.0**-36)
    before = backend.to_numpy(slot.parameter)
    for options, text in (
        ({"correlation": FilterCoefficients((1.0, 0.5), ())}, r"len\(slots\[0\].noise_state\)=0: must be 1"),
        ({"correlation": RingCoefficients((0.5,), 0)}, r"len\(slots\[0\].noise_state\)=0: must be 1"),
        ({"square": "given"}, "square=None"),
        ({"square": "separate", "square_noise": arguments[1]}, "another row or stream"),
        ({"square": "separate", "square_noise": NoiseRow(bytes(32), 0, 2**32, 1.0)}, "stream"),
        ({"unit": 0.0}, "unit=0.0"),
    ):
        refused(ArgumentError, text, backend.step, *arguments, **{"unit": 2.0**-36, **options})
        on_host = mapped(slot, backend.to_numpy)
        refused(ArgumentError, text, reference.step, [on_host], *arguments[1:], **{"unit": 2.0**-36, **options})
    longer = slot._replace(filter_state=(backend.from_numpy(ones),))
    refused(ArgumentError, "filter_state", backend.step, [longer], *arguments[1:], unit=2.0**-36)
    np.testing.assert_array_equal(backend.to_numpy(slot.parameter), before)


def test_a_bad_slot_changes_nothing(backend: Any) -> None:
    ones = np.ones((4, 4), dtype=np.float32)
    total = backend.from_numpy(np.ones((4, 4)))
    good = Slot(backend.from_numpy(ones), total, 0)
    arguments = (NoiseRow(bytes(32), 0, 0, 1.0), 1.0, (), "sgd", [UpdateSettings(1.0)] * 2)
    for bad, error, text in (
        (Slot(backend.from_numpy(ones).T, total, 4096), ArgumentTypeError, "not contiguous"),
        (Slot(*[backend.from_numpy(np.ones((4, 4))) for _ in range(2)], 4096), ArgumentTypeError, "set_backend"),
        (Slot(backend.from_numpy(ones), total, 2**36 - 4), ArgumentError, "at most"),
        (Slot(backend.from_numpy(ones), total, -1), ArgumentError, "start=-1"),
    ):
        if text == "set_backend" and backend.name == "torch":
            continue  # takes float64, as the reference does
        refused(error, text, backend.step, [good, bad], *arguments, 1, unit=2.0**-36)
        np.testing.assert_array_equal(backend.to_numpy(good.parameter), ones)
    backend.step([], *arguments[:-1], [], 1, unit=2.0**-36)


# ----------------------------------------------------------------------------------------------------- on a GPU only


@pytest.mark.cuda
def test_millions_of_elements_agree(backend: Any) -> None:
    """Enough programs to run side by side: a race would show here, the interpreter runs them one after the other."""
    rng = np.random.default_rng(8)
    slots = slots_of(rng, [3_000_001, 77, 1_000_000], 2, "adamw", True, False, noise_order=1, scaled=True)
    first_order = FilterCoefficients((1.0, 0.5), (-0.25,))
    arguments = (NoiseRow(bytes(range(32)), 2**32 - 1, 0, 2.0), 7.0, (first_order, first_order), "adamw")
    square_noise = NoiseRow(bytes(range(32)), 2**32 - 1, 2, 2.0)
    options = {"correlation": first_order, "square": "separate", "square_noise": square_noise}
    assert_steps_agree(backend, slots, arguments, [UpdateSettings(0.1, 0.01, 0.9, 0.999, 1e-8)] * 3, 2, **options)


# torch says of this mode that it is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.cuda
def test_steps_wait_for_nothing(backend: Any) -> None:
    """Neither clipping nor the step reads anything back: torch refuses every synchronization here."""
    import torch

    rng = np.random.default_rng(9)
    rows = [backend.from_numpy(floats(rng, 32, 1000))]
    slot = mapped(slots_of(rng, [1000], 0, "sgd", False, False)[0], backend.from_numpy)
    arguments = (NoiseRow(bytes(32), 0, 0, 1.0), 32.0, (), "sgd", [UpdateSettings(0.1)])
    unit, roundings = unit_of(arguments[0]), [rounding_of_rows(1000)]

    def privatized_step(number: int) -> None:
        weights = backend.clip_factors([backend.row_norms(rows)], "standard", [1.0], [1000], roundings, unit)
        backend.weighted_sum(rows, weights, [slot.total])
        backend.step([slot], *arguments, number, unit=unit)

    privatized_step(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        privatized_step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_noise_and_sum_meet_in_float64(backend: Any):
    """What remains where they cancel is far below the rounding of either to float32: three steps of the grid."""
    noise = NoiseRow(bytes(32), 0, 0, 0.7)
    m = 2.0**36 * backend.to_numpy(backend.normal(*noise[:3], 0, 100))
    parameter, total = (backend.from_numpy(x) for x in (np.zeros(100, np.float32), 3 - m))
    backend.step([Slot(parameter, total, 0)], noise, 1.0, (), "sgd", [UpdateSettings(1.0)], 1, unit=unit_of(noise))
    np.testing.assert_array_equal(-backend.to_numpy(parameter), np.float32(3 * unit_of(noise)))
