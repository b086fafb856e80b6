"""What the tests of agreement share: inputs, and the tolerance of the table in `agreement.py`.

A hypothesis example is a seed and some sizes: arrays drawn element by element would take longer than the operations.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from agreement import AGREEMENT
from hypothesis import settings
from hypothesis import strategies as st

from dpcore.spec.ops import KEPT, SECOND_MOMENT, FilterCoefficients, RingCoefficients, UpdateSettings

# Triton's interpreter takes up to a second for an example. The nightly profile still runs hundreds.
few = settings(max_examples=max(8, settings().max_examples // 2))
fewer = settings(max_examples=max(5, settings().max_examples // 5))  # where an example is many calls of kernels
fewest = settings(max_examples=max(3, settings().max_examples // 6))  # and several cases take examples of their own

SMALLEST_NORMAL = 2.0**-126
LARGEST = float(np.finfo(np.float32).max)
SPECIAL = np.array([0, -0.0, 1e-45, -1e-40, 1.2e-38, LARGEST, -LARGEST, np.inf, -np.inf, np.nan], dtype=np.float32)

seeds = st.integers(0, 2**32 - 1)
keys = st.binary(min_size=32, max_size=32)
noise_rows = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1]))
noise_streams = st.sampled_from([0, 1, 2])
rngs = st.sampled_from(["chacha20", "philox"])
# Across the edges of tiles, of programs under the interpreter (65536 elements) and on the device (half a tile).
sizes = st.sampled_from([0, 1, 2, 255, 256, 257, 4095, 4096, 4097, 9000, 65536, 65537])
small_sizes = st.sampled_from([0, 1, 2, 255, 257, 1023, 1024, 1025, 4095, 4097])
starts = st.one_of(
    st.integers(0, 2**34 - 70000), st.sampled_from([0, 1, 4095, 4096, 65535, 2**31 - 1, 2**32 - 3, 2**34 - 70000])
)
numbers = st.floats(-2, 2, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)


@st.composite
def filters(draw: st.DrawFn, order: int) -> FilterCoefficients:
    """Coefficients for a state of `order` vectors, which may be longer than they need."""
    b = draw(st.lists(numbers, min_size=1, max_size=order + 1))
    a = draw(st.lists(numbers, min_size=0, max_size=order))
    return FilterCoefficients(tuple(b), tuple(a), draw(st.sampled_from([1.0, 0.7, 3.0])))


@st.composite
def rings(draw: st.DrawFn, order: int) -> RingCoefficients:
    """Coefficients for a ring of `order` vectors, at any place of it."""
    weights = draw(st.lists(numbers, min_size=order, max_size=order))
    place = draw(st.integers(0, max(order - 1, 0)))
    return RingCoefficients(tuple(weights), place, draw(st.sampled_from([1.0, 0.7, 3.0])), draw(st.sampled_from(KEPT)))


@st.composite
def noise_filters(draw: st.DrawFn) -> FilterCoefficients:
    """Coefficients of a recurrence that correlates noise."""
    b = draw(st.lists(numbers, max_size=2))
    return FilterCoefficients((1.0, *b), tuple(draw(st.lists(numbers, max_size=2))), draw(st.sampled_from([1.0, 0.7])))


chains = st.lists(st.integers(0, 2).flatmap(filters), max_size=3)
correlated = noise_filters() | st.integers(0, 4).flatmap(rings)
correlations = st.none() | correlated
grids = st.sampled_from([36, 36, 30, 12])

rates = st.builds(
    UpdateSettings, learning_rate=st.sampled_from([1e-3, 0.1, 1.0]), weight_decay=st.sampled_from([0.0, 0.01]),
    beta1=st.sampled_from([0.0, 0.9]), beta2=st.sampled_from([0.9, 0.999]), eps=st.sampled_from([1e-8, 1e-3, 0.0]),
    bias=st.sampled_from([0.0, 0.0, 0.02]), floor=st.sampled_from([0.0, 0.0, 0.1]),
    weight=st.sampled_from([1.0, 3.0]), coupling=st.sampled_from([0.0, 0.25]),
)  # fmt: skip


def floats(rng: np.random.Generator, *shape: int, special: bool = False) -> np.ndarray:
    """Numbers of many magnitudes, read only; with `special`, a tenth are zeros, denormals, huge or not finite."""
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32)
    if special:
        chosen = rng.random(shape) < 0.1
        values[chosen] = rng.choice(SPECIAL, size=int(chosen.sum()))
    values.flags.writeable = False
    return values


def writable(array: np.ndarray) -> np.ndarray:
    """A copy to change in place."""
    return np.array(array)


def unit(magnitude: Any, digits: int = 23) -> np.ndarray:
    """One ulp of numbers of this magnitude: of float32 numbers, or those of `digits` binary digits."""
    return 2.0 ** (np.floor(np.log2(np.maximum(np.asarray(magnitude, dtype=np.float64), SMALLEST_NORMAL))) - digits)


def assert_agree(operation: str, got: Any, expected: np.ndarray, terms: Any = None) -> None:
    """Hold `got` to the row of the agreement table. `terms`: sum of the absolute values of the terms of each element.

    Where the terms come within a factor of 16 of the largest float32, one side may overflow and the other not: there
    only NaN for NaN is asked.
    """
    rule = AGREEMENT[operation]
    got = np.asarray(got)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if rule.kind == "bitwise":
        np.testing.assert_array_equal(got, expected)
        return
    with np.errstate(all="ignore"):
        magnitude = np.abs(expected).astype(np.float64) if rule.kind == "ulps" else np.asarray(terms, dtype=np.float64)
        near_overflow = ~(magnitude < LARGEST / 16) & (operation != "row_norms")
        np.testing.assert_array_equal(np.isfinite(got) | near_overflow, np.isfinite(expected) | near_overflow)
        np.testing.assert_array_equal(np.isnan(got) | near_overflow, np.isnan(expected) | near_overflow)
        same = (got == expected) | near_overflow | (np.isnan(got) & np.isnan(expected))
        error = np.where(
            same, 0.0, np.abs(got.astype(np.float64) - expected.astype(np.float64)) / unit(magnitude, rule.digits)
        )
    worst = int(np.argmax(error)) if error.size else 0
    assert not error.size or error.flat[worst] <= rule.ulps, (
        f"{operation}: {error.flat[worst]:.1f} ulps at {worst}: {got.flat[worst]!r}, expected {expected.flat[worst]!r}"
    )


# Sums of absolute values of terms, in float64: what the tolerances of kind "terms" are relative to. `g` and `x` may
# themselves be such sums, so that they compose as the operations do.


def recurrence_terms(
    x: np.ndarray, state: Sequence[np.ndarray], coefficients: FilterCoefficients
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Terms of the output and of each state vector."""
    b, a, normalizer = (np.abs(part) for part in coefficients)
    before = [np.abs(vector).astype(np.float64) for vector in state] + [np.zeros(1)]
    x = np.abs(x).astype(np.float64)
    with np.errstate(all="ignore"):
        y = b[0] * x + before[0]
        after = [
            (b[k] if k < len(b) else 0) * x + (a[k - 1] if k <= len(a) else 0) * y + before[k]
            for k in range(1, len(state) + 1)
        ]
        return y / normalizer, after


def update_terms(
    rule: str,
    parameter: np.ndarray,
    direction: np.ndarray,
    direction_terms: np.ndarray,
    moments: Sequence[np.ndarray],
    settings: UpdateSettings,
    step_number: int,
    square: np.ndarray | None = None,
    square_terms: np.ndarray | None = None,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Terms of the parameter and of each moment, all inputs as they were before the step."""
    rate, decay, beta1, beta2, *_, weight, coupling = settings
    x = np.abs(parameter).astype(np.float64)
    with np.errstate(all="ignore"):
        total, signed = np.abs(direction_terms).astype(np.float64), direction.astype(np.float64)
        if rule not in ("adamw", "accelerated") and decay:
            total, signed = total + decay * x, signed + decay * parameter.astype(np.float64)
        if rule == "sgd":
            return x + rate * total, []
        if rule in ("momentum", "nesterov"):
            m = beta1 * np.abs(moments[0]) + total
            return x + rate * (m if rule == "momentum" else total + beta1 * m), [m]
        if rule == "accelerated":
            z, y = np.abs(moments[0]) + rate * total, x + rate / weight * total
            return (1 - coupling) * y + coupling * z, [z, y]
        kept, added, unbias1, unbias2 = 1.0, 1.0, 1.0, 1.0
        if rule != "adagrad":
            kept, added, unbias1, unbias2 = beta2, 1 - beta2, 1 - beta1**step_number, 1 - beta2**step_number
        if square is None:
            # Cancellation in g reaches the step through v as well: d(g^2) = 2 g d(g) + d(g)^2.
            h, h_terms, h_error = signed**2, total**2, SLACK * total * np.abs(signed) + (SLACK * total) ** 2
        else:
            h, h_terms, h_error = square.astype(np.float64), square_terms, SLACK * np.asarray(square_terms)
        v = kept * moments[SECOND_MOMENT[rule]].astype(np.float64)
        v_terms, v_error = np.abs(v) + added * h_terms, SLACK * np.abs(v) + added * h_error
        m = total if rule == "adagrad" else beta1 * np.abs(moments[0]) + (1 - beta1) * total
        u, u_error = (v + added * h) / unbias2, v_error / unbias2
        step = quotient_terms(rate / unbias1 * m, u, u_error, settings)
        return x + step, [v_terms] if rule == "adagrad" else [m, v_terms]


# Relative error allowed in u, the argument of a denominator, before it is taken through the square root.
SLACK = 16 * 2.0**-23


def quotient_terms(numerator: np.ndarray, u: np.ndarray, u_error: np.ndarray, settings: UpdateSettings) -> np.ndarray:
    """Terms of numerator / D(u), with what the error of u does to D; infinite where nobody can say whether D is 0."""

    def denominator(u: np.ndarray) -> np.ndarray:
        return np.sqrt(np.maximum(u - settings.bias, settings.floor**2)) + settings.eps

    error = u_error + SLACK * (np.abs(u) * (settings.bias != 0) + settings.bias)
    error = error + np.where(error > 0, 4 * 2.0**-149, 0)
    least, most = denominator(u - error), denominator(u + error)
    # Both sides hold the same 0, and the coordinate does not move.
    return np.where(most == 0, 0.0, numerator / denominator(u) + numerator * (1 / least - 1 / most) / (8 * 2.0**-23))
