"""Correlated noise on a grid: one step of a recurrence, or of a sum over a ring of earlier vectors.

Noise is in integers here, 2^bits times the port's values; states are the port's. The loop over a ring's vectors is
outside of that over a thread's elements: the sums stay in registers, whatever the number of vectors, and each weight
and address is read once for all elements.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from dpcore.spec.check import check_correlate
from dpcore.spec.ops import Correlation, RingCoefficients
from dpcore.spec.rounded_normal import FRACTION_BITS
from dpcore_triton.arrays import written_back
from dpcore_triton.filter import loaded, pointers, store
from dpcore_triton.grid import nearest
from dpcore_triton.launch import ELEMENTS, common_device, current_stream, jit, kernel, launch, numbers, table
from dpcore_triton.stream import LANES, load_at, store_at


def correlate(
    z: torch.Tensor, state: Sequence[torch.Tensor], coefficients: Correlation, *, bits: int = FRACTION_BITS
) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.correlate`."""
    check_correlate(z, state, coefficients, bits)
    if not state:
        return z
    device = common_device(z=[z], state=state)
    n = z.detach().contiguous() * 2.0**bits
    m = torch.empty_like(n)
    taps = numbers((2.0**bits, 2.0**-bits, *correlation_taps(coefficients)), device, current_stream(device), "float64")
    with written_back(*state) as lent:
        addresses = [array.data_ptr() for array in (n, m, *lent)]
        rows, _, programs = table([(n.numel(), *addresses)], [-(-n.numel() // ELEMENTS)], device)
        if isinstance(coefficients, RingCoefficients):
            kind: dict[str, Any] = {"ORDER": len(state), "KEEPS": coefficients.keeps, "ELEMENTS": ELEMENTS}
            launch(_ring_kernel, (programs,), device, rows, taps, int(coefficients.place), **kind)
        else:
            kind = {"NB": len(coefficients.b), "TAPS": 1 + len(coefficients.b) + len(coefficients.a)}
            launch(
                _recurrence_kernel, (programs,), device, rows, taps, **kind, ORDER=len(state), ELEMENTS=ELEMENTS
            )  # fmt: skip
    return m.mul_(2.0**-bits)


def correlation_taps(coefficients: Correlation | None) -> tuple[float, ...]:
    """Return the reciprocal of the normalizer, then a ring's weights, or a recurrence's b and a."""
    if coefficients is None:
        return (1.0,)
    if isinstance(coefficients, RingCoefficients):
        return (1 / float(coefficients.normalizer), *map(float, coefficients.weights))
    return (1 / float(coefficients.normalizer), *map(float, coefficients.b), *map(float, coefficients.a))


@kernel("place")
def _ring_kernel(row, taps, place, ORDER: tl.constexpr, KEEPS: tl.constexpr, ELEMENTS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = i < tl.load(row + 1)
    n, m = pointers(row, i, 2, 2, tl.float64)
    found = ring_elements((tl.load(n, mask=mask, other=0.0),), row + 4, i, i, 0, tl.load(row + 1), taps, place,
                          ORDER, KEEPS, True)  # fmt: skip
    tl.store(m, found[0], mask=mask)


@kernel()
def _recurrence_kernel(
    row, taps, NB: tl.constexpr, TAPS: tl.constexpr, ORDER: tl.constexpr, ELEMENTS: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = i < tl.load(row + 1)
    n, m = pointers(row, i, 2, 2, tl.float64)
    states = pointers(row, i, 4, ORDER, tl.float64)
    values = ()
    for k in tl.static_range(2 + TAPS):
        values += (tl.load(taps + k),)  # type: ignore[assignment]
    found = correlated_elements(tl.load(n, mask=mask, other=0.0), loaded(states, mask), values, NB)
    tl.store(m, found[0], mask=mask)
    store(states, found[1:], mask)


@jit
def ring_elements(
    n, ring, index, first, low, high, taps, place, ORDER: tl.constexpr, KEEPS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Take one step for a tuple of elements, each LANES after the previous one; return its outputs.

    `ring` points to the addresses of the vectors, and `index` is the place of the first elements in them. Elements are
    in the tensor if their places, from `first` on, lie in ``low <= place < high``. `taps` points to 2^bits, 2^-bits and
    `correlation_taps`.
    """
    r = ()
    for word in tl.static_range(len(n)):
        r += (n[word] * 0.0,)  # type: ignore[assignment]
    for j in range(1, ORDER + 1):
        weight = tl.load(taps + 2 + j)
        vector = tl.load(ring + (place + ORDER - j) % ORDER).to(tl.pointer_type(tl.float64)) + index
        added = ()
        for word in tl.static_range(len(n)):
            shift = word * LANES
            earlier = load_at(vector + shift, first + shift, low, high, MASKED)
            added += (r[word] + weight * earlier,)  # type: ignore[assignment]
        r = added
    wide, narrow, divided = tl.load(taps), tl.load(taps + 1), tl.load(taps + 2)
    m = ()
    for word in tl.static_range(len(n)):
        m += (n[word] + nearest(r[word] * wide),)  # type: ignore[assignment]
    if ORDER > 0:
        vector = tl.load(ring + place).to(tl.pointer_type(tl.float64)) + index
        for word in tl.static_range(len(n)):
            shift = word * LANES
            kept = (m[word] * narrow) * divided if KEEPS == "output" else n[word] * narrow
            store_at(vector + shift, kept, first + shift, low, high, MASKED)
    return m


@jit
def correlated_elements(n, states, taps, NB: tl.constexpr):
    """Advance a recurrence by one step: returns its output in integers, then the new states. `taps` are values."""
    b, a = taps[3 : 3 + NB], taps[3 + NB :]
    m = n
    if len(states) > 0:
        m = n + nearest(states[0] * taps[0])
    y = m * taps[1]
    x = y
    if len(states) > 0:
        x = y - states[0]
    advanced = ()
    for k in tl.static_range(1, len(states) + 1):
        s = x * 0.0
        if k < len(b):
            s = b[k] * x
        if k <= len(a):
            s -= a[k - 1] * y
        if k < len(states):
            s += states[k]
        advanced += (s,)  # type: ignore[assignment]
    return (m,) + advanced  # noqa: RUF005 - Triton knows no starred expression
