"""Filter, update and the fused step: Triton's kernels against the NumPy reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    assert_agree,
    few,
    filters,
    floats,
    keys,
    noise_rows,
    poisoned_memory,
    rates,
    recurrence_terms,
    rngs,
    seeds,
    small_sizes,
    update_terms,
    writable,
)

import dpcore_numpy as reference
from dpcore.config import load_backend
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.ops import UPDATE_RULES, FilterCoefficients, NoiseRow, Slot, UpdateSettings

pytest.importorskip("triton")

orders = st.integers(0, 3)
rules = st.sampled_from(sorted(UPDATE_RULES))
step_numbers = st.sampled_from([1, 2, 1000])


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def moments_of(rng: np.random.Generator, rule: str, size: int, special: bool) -> tuple[np.ndarray, ...]:
    vectors = [floats(rng, size, special=special) for _ in range(UPDATE_RULES[rule])]
    return tuple(writable(np.abs(vector) if index == 1 else vector) for index, vector in enumerate(vectors))


@few
@given(st.data(), seeds, orders, small_sizes, st.booleans())
def test_recurrences_agree(data: st.DataObject, seed: int, order: int, size: int, special: bool) -> None:
    backend, rng, coefficients = load_backend("triton"), np.random.default_rng(seed), data.draw(filters(order))
    x, state = floats(rng, size, special=special), [writable(floats(rng, size, special=special)) for _ in range(order)]
    sent, sent_state = backend.from_numpy(x), [backend.from_numpy(vector) for vector in state]
    y_terms, state_terms = recurrence_terms(x, state, coefficients)
    with np.errstate(all="ignore"):
        y = reference.recurrence(x, state, coefficients)
    assert_agree("recurrence", backend.to_numpy(backend.recurrence(sent, sent_state, coefficients)), y, y_terms)
    for got, expected, terms in zip(sent_state, state, state_terms, strict=True):
        assert_agree("recurrence", backend.to_numpy(got), expected, terms)
    np.testing.assert_array_equal(backend.to_numpy(sent), x)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("rule", sorted(UPDATE_RULES))
@few
@given(seeds, rates, step_numbers, small_sizes, st.booleans())
def test_updates_agree(
    rule: str, weight_decay: float, seed: int, settings: UpdateSettings, number: int, size: int, special: bool
) -> None:
    backend, rng = load_backend("triton"), np.random.default_rng(seed)
    settings = settings._replace(weight_decay=weight_decay)
    x, g = writable(floats(rng, size, special=special)), floats(rng, size, special=special)
    moments = moments_of(rng, rule, size, special)
    sent, direction, sent_moments = backend.from_numpy(x), backend.from_numpy(g), list(map(backend.from_numpy, moments))
    x_terms, moment_terms = update_terms(rule, x, g, g, moments, settings, number)
    with np.errstate(all="ignore"):
        reference.update(rule, x, g, moments, settings, number)
    backend.update(rule, sent, direction, sent_moments, settings, number)
    assert_agree("update", backend.to_numpy(sent), x, x_terms)
    for got, expected, terms in zip(sent_moments, moments, moment_terms, strict=True):
        assert_agree("update", backend.to_numpy(got), expected, terms)
    np.testing.assert_array_equal(backend.to_numpy(direction), g)


def test_plain_operations_take_views() -> None:
    backend, rng = load_backend("triton"), np.random.default_rng(3)
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
    rng: np.random.Generator, sizes: list[int], order: int, rule: str, displaced: bool, special: bool
) -> list[Slot[np.ndarray]]:
    """Tensors laid out as a run would; the last one is a shard that begins inside a tile."""
    slots, first = [], 0
    for index, size in enumerate(sizes):
        shard = 1003 if index == len(sizes) - 1 else 0
        slots.append(
            Slot(
                parameter=writable(floats(rng, size, special=special)),
                total=floats(rng, size, special=special),
                first=first + shard,
                filter_state=tuple(writable(floats(rng, size)) for _ in range(order)),
                moments=moments_of(rng, rule, size, False),
                displacement=np.full(size, np.nan, dtype=np.float32) if displaced else None,
            )
        )
        first += 4096 * (2 + (size + shard) // 4096)
    return slots


def mapped(slot: Slot[Any], change: Callable[[Any], Any]) -> Slot[Any]:
    return replace(
        slot,
        parameter=change(slot.parameter),
        total=change(slot.total),
        filter_state=tuple(map(change, slot.filter_state)),
        moments=tuple(map(change, slot.moments)),
        displacement=None if slot.displacement is None else change(slot.displacement),
    )


def step_terms(
    slot: Slot[np.ndarray], noise: NoiseRow, batch: float, coefficients: FilterCoefficients, rule: str,
    settings: UpdateSettings, number: int,
) -> Slot[Any]:  # fmt: skip
    """Terms of every array that a step changes, composed as the step is."""
    z = np.zeros(slot.total.shape)
    if noise.scale:
        z = reference.normal(
            noise.key, noise.row, noise.stream, slot.first, slot.total.size, dtype="float64", rng=noise.rng
        )
    with np.errstate(all="ignore"):
        g_terms = (np.abs(slot.total) + noise.scale * np.abs(z)) / batch
        y_terms, state_terms = recurrence_terms(g_terms, slot.filter_state, coefficients)
        state = [writable(vector).astype(np.float64) for vector in slot.filter_state]
        y = reference.recurrence((slot.total + noise.scale * z) / batch, state, coefficients)
    x_terms, moment_terms = update_terms(rule, slot.parameter, y, y_terms, slot.moments, settings, number)
    return replace(
        slot,
        parameter=x_terms,
        filter_state=tuple(state_terms),
        moments=tuple(moment_terms),
        displacement=None if slot.displacement is None else x_terms,
    )


def changed(slot: Slot[Any]) -> list[Any]:
    return [
        slot.parameter, *slot.filter_state, *slot.moments, *(() if slot.displacement is None else (slot.displacement,))
    ]  # fmt: skip


@few
@given(
    st.data(),
    seeds,
    st.lists(st.sampled_from([0, 1, 17, 4096, 5000]), min_size=1, max_size=3),
    orders,
    rules,
    st.sampled_from([0.0, 3.0]),
    noise_rows,
    keys,
    rngs,
    step_numbers,
    st.booleans(),
    st.booleans(),
)
def test_steps_agree(
    data: st.DataObject, seed: int, sizes: list[int], order: int, rule: str, scale: float, row: int, key: bytes,
    rng: str, number: int, displaced: bool, special: bool,
) -> None:  # fmt: skip
    backend, coefficients = load_backend("triton"), data.draw(filters(order))
    settings = data.draw(st.lists(rates, min_size=len(sizes), max_size=len(sizes)))
    slots = slots_of(np.random.default_rng(seed), sizes, order, rule, displaced, special)
    noise = NoiseRow(key, row, 0, scale, rng)
    terms = [
        step_terms(slot, noise, 7.0, coefficients, rule, numbers, number)
        for slot, numbers in zip(slots, settings, strict=True)
    ]
    sent = [mapped(slot, backend.from_numpy) for slot in slots]
    with np.errstate(all="ignore"):
        reference.step(slots, noise, 7.0, coefficients, rule, settings, number)
    backend.step(sent, noise, 7.0, coefficients, rule, settings, number)
    for got, expected, allowed in zip(sent, slots, terms, strict=True):
        for ours, theirs, bound in zip(changed(got), changed(expected), changed(allowed), strict=True):
            assert_agree("step", backend.to_numpy(ours), theirs, bound)
        np.testing.assert_array_equal(backend.to_numpy(got.total), expected.total)


@few
@given(st.data(), seeds, orders, rules, noise_rows, st.booleans())
def test_a_step_is_the_composition_of_the_plain_operations(
    data: st.DataObject, seed: int, order: int, rule: str, row: int, displaced: bool
) -> None:
    """Bit for bit: the same functions on the same numbers. (Scale and batch size are powers of two, torch's own.)"""
    backend, coefficients, numbers = load_backend("triton"), data.draw(filters(order)), data.draw(rates)
    (slot,) = slots_of(np.random.default_rng(seed), [4100], order, rule, displaced, False)
    fused, plain = mapped(slot, backend.from_numpy), mapped(slot, backend.from_numpy)
    noise = NoiseRow(bytes(range(32)), row, 1, 2.0)
    backend.step([fused], noise, 8.0, coefficients, rule, [numbers], 3)

    z = backend.normal(noise.key, row, 1, slot.first, 4100)
    before = plain.parameter.clone()
    y = backend.recurrence((plain.total + 2.0 * z) / 8.0, plain.filter_state, coefficients)
    backend.update(rule, plain.parameter, y, plain.moments, numbers, 3)
    if displaced:
        plain.displacement.copy_(plain.parameter - before)
    for ours, theirs in zip(changed(fused), changed(plain), strict=True):
        np.testing.assert_array_equal(backend.to_numpy(ours), backend.to_numpy(theirs))


def test_nothing_around_the_tensors_is_touched() -> None:
    """All arrays of all slots are cut out of one buffer; whatever lies between them keeps its value."""
    backend, rng = load_backend("triton"), np.random.default_rng(5)
    slots = slots_of(rng, [1, 4097, 0, 300], 1, "adam", True, False)
    buffer = backend.from_numpy(np.full(40000, 77.0, dtype=np.float32))
    taken = np.zeros(40000, dtype=bool)
    place = 5

    def cut(array: np.ndarray) -> Any:
        nonlocal place
        view = buffer[place : place + array.size]
        view.copy_(backend.from_numpy(array))
        taken[place : place + array.size] = True
        place += array.size + 3
        return view

    sent = [mapped(slot, cut) for slot in slots]
    totals = [backend.to_numpy(slot.total) for slot in sent]
    noise, coefficients = NoiseRow(bytes(32), 0, 0, 1.0), FilterCoefficients((1.0, 0.5), (0.5,))
    backend.step(sent, noise, 2.0, coefficients, "adam", [UpdateSettings(0.1, 0.0, 0.9, 0.99, 1e-8)] * 4, 1)
    assert (backend.to_numpy(buffer)[~taken] == 77).all()
    for slot, total in zip(sent, totals, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(slot.total), total)
        assert not np.isnan(backend.to_numpy(slot.displacement)).any()


def test_slots_of_different_kinds_take_part_in_one_step() -> None:
    """A tensor with a longer filter state, one with a displacement, one with neither."""
    backend, rng = load_backend("triton"), np.random.default_rng(6)
    kinds = [(2, False), (1, True), (1, False)]
    slots = [slots_of(rng, [50], order, "sgd", displaced, False)[0] for order, displaced in kinds]
    slots = [replace(slot, first=4096 * index) for index, slot in enumerate(slots)]
    sent = [mapped(slot, backend.from_numpy) for slot in slots]
    arguments = (NoiseRow(bytes(32), 9, 0, 1.5), 4.0, FilterCoefficients((0.5, 0.5), (-0.25,)), "sgd")
    settings = [UpdateSettings(0.1), UpdateSettings(0.1), UpdateSettings(0.3, 0.01)]
    reference.step(slots, *arguments, settings, 1)
    backend.step(sent, *arguments, settings, 1)
    for got, expected in zip(sent, slots, strict=True):
        for ours, theirs in zip(changed(got), changed(expected), strict=True):
            np.testing.assert_allclose(backend.to_numpy(ours), theirs, rtol=1e-4, atol=1e-5)


def test_a_moved_tensor_is_found_again() -> None:
    """Tables of addresses are kept from step to step: swapping a parameter's memory must not go unnoticed."""
    backend = load_backend("triton")
    arguments = (NoiseRow(bytes(32), 0, 0, 0.0), 1.0, FilterCoefficients((1.0,), ()), "sgd", [UpdateSettings(1.0)], 1)
    ones = np.ones(10, dtype=np.float32)
    parameter, total = backend.from_numpy(ones), backend.from_numpy(ones)
    slot = Slot(parameter, total, 0)
    backend.step([slot], *arguments)
    first, parameter.data = parameter.data, backend.from_numpy(10 * ones)
    backend.step([slot], *arguments)
    np.testing.assert_array_equal(backend.to_numpy(first), 0 * ones)
    np.testing.assert_array_equal(backend.to_numpy(parameter), 9 * ones)


def test_a_bad_slot_changes_nothing() -> None:
    backend = load_backend("triton")
    ones = np.ones((4, 4), dtype=np.float32)
    good = Slot(backend.from_numpy(ones), backend.from_numpy(ones), 0)
    arguments = (NoiseRow(bytes(32), 0, 0, 1.0), 1.0, FilterCoefficients((1.0,), ()), "sgd", [UpdateSettings(1.0)] * 2)
    for bad, error, text in (
        (Slot(backend.from_numpy(ones).T, backend.from_numpy(ones), 4096), ArgumentTypeError, "not contiguous"),
        (Slot(*[backend.from_numpy(ones.astype(np.float64))] * 2, 4096), ArgumentTypeError, "set_backend"),
        (Slot(backend.from_numpy(ones), backend.from_numpy(ones), 2**36 - 4), ArgumentError, "at most"),
        (Slot(backend.from_numpy(ones), backend.from_numpy(ones), -1), ArgumentError, "start=-1"),
    ):
        with pytest.raises(error, match=text):
            backend.step([good, bad], *arguments, 1)
        np.testing.assert_array_equal(backend.to_numpy(good.parameter), ones)
    backend.step([], *arguments[:-1], [], 1)


# ----------------------------------------------------------------------------------------------------- on a GPU only


@pytest.mark.gpu
def test_millions_of_elements_agree() -> None:
    """Enough programs to run side by side: a race would show here, the interpreter runs them one after the other."""
    backend, rng = load_backend("triton"), np.random.default_rng(8)
    slots = slots_of(rng, [3_000_001, 77, 1_000_000], 1, "adamw", True, False)
    sent = [mapped(slot, backend.from_numpy) for slot in slots]
    noise, coefficients = NoiseRow(bytes(range(32)), 2**32 - 1, 0, 2.0), FilterCoefficients((0.5, 0.5), (-0.25,))
    settings = [UpdateSettings(0.1, 0.01, 0.9, 0.999, 1e-8)] * 3
    terms = [step_terms(slot, noise, 7.0, coefficients, "adamw", settings[0], 2) for slot in slots]
    reference.step(slots, noise, 7.0, coefficients, "adamw", settings, 2)
    backend.step(sent, noise, 7.0, coefficients, "adamw", settings, 2)
    for got, expected, allowed in zip(sent, slots, terms, strict=True):
        for ours, theirs, bound in zip(changed(got), changed(expected), changed(allowed), strict=True):
            assert_agree("step", backend.to_numpy(ours), theirs, bound)


@pytest.mark.gpu
def test_steps_wait_for_nothing() -> None:
    """Neither clipping nor the step reads anything back: torch refuses every synchronization here."""
    import torch

    backend, rng = load_backend("triton"), np.random.default_rng(9)
    rows = [backend.from_numpy(floats(rng, 32, 1000))]
    slot = mapped(slots_of(rng, [1000], 0, "sgd", False, False)[0], backend.from_numpy)
    arguments = (NoiseRow(bytes(32), 0, 0, 1.0), 32.0, FilterCoefficients((1.0,), ()), "sgd", [UpdateSettings(0.1)])

    def privatized_step(number: int) -> None:
        (factors,) = backend.clip_factors([backend.row_norms(rows)], "standard", [1.0], [1000], "float32")
        backend.weighted_sum(rows, [factors], [slot.total])
        backend.step([slot], *arguments, number)

    privatized_step(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        privatized_step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
