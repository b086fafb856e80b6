"""Checks that every backend makes: shapes, dtypes and memory layouts.

Both NumPy arrays and torch tensors come here, so dtypes are compared by name. ("torch.float32" and "float32" are one.)
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.grid import step_of
from dpcore.spec.memory import Named, check_in_place, check_place, listed
from dpcore.spec.ops import (
    KEPT,
    SECOND_MOMENT,
    SQUARES,
    UPDATE_RULES,
    Correlation,
    FilterCoefficients,
    NoiseRow,
    RingCoefficients,
    Slot,
    UpdateSettings,
)
from dpcore.spec.rounded_normal import FRACTION_BITS
from dpcore.spec.stream import check_key, check_range
from dpcore.spec.validate import choice, integer, non_negative, positive

FLOATS = ("float32", "float64")
HALVES = ("bfloat16", "float16")
"""16-bit dtypes that examples' vectors may have, too: each of their numbers is read as the equal float32 number."""


def dtype_name(array: Any) -> str:
    """Return "float32" for both NumPy's and torch's."""
    return _name(array.dtype)


def read_as(array: Any) -> str:
    """Return the name of the dtype that an example's array is computed in: float32 for one of 16 bits."""
    return "float32" if dtype_name(array) in HALVES else dtype_name(array)


@lru_cache(maxsize=64)
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def check_float(
    name: str,
    array: Any,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    halves: bool = False,
) -> None:
    """Refuse anything but a floating-point array of `dtype` and `shape`; with `halves`, 16 bits count as float32."""
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise ArgumentTypeError(f"{name} of type {type(array).__name__}: must be an array of the active backend")
    kind = read_as(array) if halves else dtype_name(array)
    if kind not in FLOATS:
        others = ", or one of 16 bits" if halves else ""
        raise ArgumentTypeError(f"{name}.dtype={dtype_name(array)}: must be float32 or float64{others}")
    if dtype is not None and kind != dtype:
        raise ArgumentTypeError(f"{name}.dtype={dtype_name(array)}: must be {dtype} as the other arrays")
    if shape is not None and tuple(array.shape) != shape:
        raise ArgumentError(f"{name}.shape={tuple(array.shape)}: must be {shape}")


def check_count(name: str, values: Sequence[Any], count: int, words: str) -> None:
    """Refuse a sequence that does not have `count` members."""
    if len(values) != count:
        raise ArgumentError(f"len({name})={len(values)}: must be {count}, {words}")


def check_outputs(
    examples: int,
    sizes: Sequence[int],
    weights: Sequence[Any],
    out: Sequence[Any],
    words: str,
    read: Sequence[Named] = (),
) -> None:
    """Refuse weights that are not (B,), and outputs that are not contiguous (d_l,) of float64 with their own memory."""
    check_count("weights", weights, len(sizes), words)
    check_count("out", out, len(sizes), words)
    for index, size in enumerate(sizes):
        check_float(f"weights[{index}]", weights[index], "float64", (examples,))
        check_float(f"out[{index}]", out[index], "float64", (size,))
        check_in_place(f"out[{index}]", out[index])
    different = {id(named[1]): named for named in listed("weights", weights)}
    check_place(listed("out", out), [*different.values(), *read])


def check_dtype(backend: Any, dtype: str, name: str) -> None:
    """Refuse parameters of a dtype that the backend does not compute in, by the name that the caller gave them."""
    if dtype == "float64" and backend.name == "triton":
        raise ArgumentTypeError(
            f"{name}.dtype=float64: must be float32 under backend 'triton', or call dpcore.set_backend(\"numpy\")"
        )


def order_of(coefficients: FilterCoefficients) -> int:
    """Return the number of state vectors that a filter takes."""
    return max(len(coefficients.a), len(coefficients.b) - 1)


def check_recurrence(x: Any, state: Sequence[Any], coefficients: FilterCoefficients) -> None:
    """Refuse a state that is too short for the filter, does not fit `x`, or shares memory."""
    _check_state(x, state, coefficients)
    check_place(listed("state", state), [("x", x)])


def _check_state(x: Any, state: Sequence[Any], coefficients: FilterCoefficients) -> None:
    check_float("x", x)
    order = order_of(coefficients)
    if not coefficients.b or len(state) < order:
        raise ArgumentError(f"len(state)={len(state)}: must be at least {order}, the order of b={coefficients.b}, ...")
    for index, vector in enumerate(state):
        check_float(f"state[{index}]", vector, dtype_name(x), tuple(x.shape))


def check_places(coefficients: RingCoefficients) -> None:
    """Refuse a place outside of the ring, and an unknown kind of entry."""
    count = len(coefficients.weights)
    if integer(0, place=coefficients.place) >= max(count, 1):
        raise ArgumentError(f"place={coefficients.place}: must be less than {count}, the number of weights of the ring")
    choice(KEPT, keeps=coefficients.keeps)


def check_correlate(z: Any, state: Sequence[Any], coefficients: Correlation, bits: int) -> None:
    """Refuse noise and states that are not float64, do not fit each other, or share memory, and digits out of range."""
    check_bits(bits)
    check_float("z", z, "float64")
    _check_noise_state("state", z, state, coefficients)
    check_place(listed("state", state), [("z", z)])


def check_bits(bits: int) -> None:
    """Refuse a grid that is finer than the draws."""
    if not 0 <= integer(bits=bits) <= FRACTION_BITS:
        raise ArgumentError(f"bits={bits}: must be from 0 to {FRACTION_BITS}")


def _check_noise_state(name: str, like: Any, state: Sequence[Any], coefficients: Correlation) -> None:
    if isinstance(coefficients, RingCoefficients):
        check_places(coefficients)
        check_count(name, state, len(coefficients.weights), "one for each weight of the ring")
    else:
        if not coefficients.b or coefficients.b[0] != 1:
            raise ArgumentError(f"b={coefficients.b}: must begin with 1 if noise is correlated")
        check_count(name, state, order_of(coefficients), "the order of the recurrence")
    for index, vector in enumerate(state):
        check_float(f"{name}[{index}]", vector, "float64", tuple(like.shape))


def check_update(
    rule: str, parameter: Any, direction: Any, moments: Sequence[Any], step_number: int, square: Any = None
) -> None:
    """Refuse a direction, square or moments that do not fit the parameter or share memory, or too few moments."""
    _check_rule(rule, parameter, direction, moments, step_number, square)
    read = [("direction", direction), *(() if square is None else [("square", square)])]
    check_place([("parameter", parameter), *listed("moments", moments)], read)


def _check_rule(
    rule: str, parameter: Any, direction: Any, moments: Sequence[Any], step_number: int, square: Any
) -> None:
    choice(UPDATE_RULES, rule=rule)
    integer(1, step_number=step_number)
    check_float("parameter", parameter)
    if len(moments) != UPDATE_RULES[rule]:
        raise ArgumentError(f"len(moments)={len(moments)}: must be {UPDATE_RULES[rule]} for rule={rule!r}")
    others = [("direction", direction), *((f"moments[{i}]", m) for i, m in enumerate(moments))]
    if square is not None:
        if rule not in SECOND_MOMENT:
            raise ArgumentError(f"square: must be None for rule={rule!r}, which has no second moment")
        others.append(("square", square))
    for name, array in others:
        check_float(name, array, dtype_name(parameter), tuple(parameter.shape))


def check_step(
    slots: Sequence[Slot[Any]],
    noise: NoiseRow,
    batch_size: float,
    filters: Sequence[FilterCoefficients],
    rule: str,
    settings: Sequence[UpdateSettings],
    step_number: int,
    unit: float,
    correlation: Correlation | None = None,
    square: str = "filtered",
    square_noise: NoiseRow | None = None,
) -> None:
    """Refuse whatever `step` could not carry out completely, before it has changed anything."""
    check_key(noise.key)
    check_bits(noise.bits)
    non_negative(noise_scale=noise.scale)
    positive(batch_size=batch_size)
    positive(unit=unit)
    choice(SQUARES, square=square)
    if square != "filtered" and rule not in SECOND_MOMENT:
        raise ArgumentError(f"square={square!r}: must be 'filtered' for rule={rule!r}, which has no second moment")
    if square_noise is not None:
        check_key(square_noise.key)
        check_bits(square_noise.bits)
        non_negative(square_noise_scale=square_noise.scale)
        if square != "separate":
            raise ArgumentError(f"square_noise: must be None for square={square!r}; only 'separate' adds it")
        if square_noise[:3] == noise[:3]:
            raise ArgumentError("square_noise: must be of another row or stream than noise, or both share their draws")
    if isinstance(correlation, RingCoefficients):
        check_places(correlation)
    check_count("settings", settings, len(slots), "one for each slot")
    order = sum(map(order_of, filters))
    changed, read = list[Named](), list[Named]()
    for index, slot in enumerate(slots):
        for drawn in (noise, *(() if square_noise is None else (square_noise,))):
            check_range(drawn.row, drawn.stream, slot.first, math.prod(slot.parameter.shape), drawn.rng)
        check_count(f"slots[{index}].filter_state", slot.filter_state, order, "the orders of all filters")
        done = 0
        for coefficients in filters:
            _check_state(slot.parameter, slot.filter_state[done : done + order_of(coefficients)], coefficients)
            done += order_of(coefficients)
        if correlation is not None:
            _check_noise_state(f"slots[{index}].noise_state", slot.parameter, slot.noise_state, correlation)
        if square == "given" and slot.square is None:
            raise ArgumentError(f"slots[{index}].square=None: must be given for square='given'")
        _check_rule(rule, slot.parameter, slot.parameter, slot.moments, step_number, slot.square)
        check_float(f"slots[{index}].total", slot.total, "float64", tuple(slot.parameter.shape))
        changed.append((f"slots[{index}].parameter", slot.parameter))
        for name in ("filter_state", "noise_state", "moments"):
            changed += listed(f"slots[{index}].{name}", getattr(slot, name))
        read.append((f"slots[{index}].total", slot.total))
        for name, kind in (("displacement", changed), ("scale", read), ("square", read)):
            vector = getattr(slot, name)
            if vector is not None:
                kind.append((f"slots[{index}].{name}", vector))
                check_float(f"slots[{index}].{name}", vector, dtype_name(slot.parameter), tuple(slot.parameter.shape))
    for called, vector in (*changed, *read):
        check_in_place(called, vector)
    check_place(changed, read)
    wanted = step_of(noise.scale, noise.bits, 1.0 if correlation is None else correlation.normalizer)
    if noise.scale and unit != wanted:  # or sum and noise would be of different sizes
        raise ArgumentError(f"unit={unit!r}: must be {wanted!r}, the step of the noise's grid")
