"""The filter stage: one step of a linear recurrence over time."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from dpcore.spec.check import check_recurrence
from dpcore.spec.ops import FilterCoefficients
from dpcore_triton.arrays import written_back
from dpcore_triton.launch import ELEMENTS, common_device, float32_only, jit, kernel, launch, table


def recurrence(x: torch.Tensor, state: Sequence[torch.Tensor], coefficients: FilterCoefficients) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.recurrence`."""
    check_recurrence(x, state, coefficients)
    float32_only(x=[x])
    device = common_device(x=[x], state=state)
    x = x.detach().contiguous()
    y = torch.empty_like(x)
    with written_back(*state) as lent:
        addresses = [array.data_ptr() for array in (x, y, *lent)]
        rows, _, programs = table([(x.numel(), *addresses)], [-(-x.numel() // ELEMENTS)], device)
        order = {"NB": len(coefficients.b), "ORDER": len(state)}
        launch(_recurrence_kernel, (programs,), device, rows, taps_of(coefficients), **order, ELEMENTS=ELEMENTS)
    return y


def taps_of(coefficients: FilterCoefficients) -> tuple[float, ...]:
    """Return the reciprocal of the normalizer, then b, then a, as one argument of a kernel, never empty."""
    b, a, normalizer = coefficients
    return (float(1 / normalizer), *map(float, b), *map(float, a))


@kernel()
def _recurrence_kernel(row, taps, NB: tl.constexpr, ORDER: tl.constexpr, ELEMENTS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = i < tl.load(row + 1)
    x, y = pointers(row, i, 2, 2)
    states = pointers(row, i, 4, ORDER)
    found = recurrence_elements(tl.load(x, mask=mask, other=0.0), loaded(states, mask), taps, NB)
    tl.store(y, found[0], mask=mask)
    store(states, found[1:], mask)


@jit
def pointers(row, i, FIRST: tl.constexpr, COUNT: tl.constexpr, KIND: tl.constexpr = tl.float32):
    """Return pointers to the elements `i` of the arrays whose addresses are in columns of the table."""
    found = ()
    for column in tl.static_range(FIRST, FIRST + COUNT):
        found += (tl.load(row + column).to(tl.pointer_type(KIND)) + i,)  # type: ignore[assignment]
    return found


@jit
def loaded(places, mask):
    """Return the elements that the pointers point to, 0 outside of the mask."""
    values = ()
    for k in tl.static_range(len(places)):
        values += (tl.load(places[k], mask=mask, other=0.0),)  # type: ignore[assignment]
    return values


@jit
def store(places, values, mask):
    """Store elements at the pointers."""
    for k in tl.static_range(len(places)):
        tl.store(places[k], values[k], mask=mask)


@jit
def recurrence_elements(x, states, taps, NB: tl.constexpr):
    """Advance the filter by one step: returns the normalized output, then the new states."""
    b, a = taps[1 : 1 + NB], taps[1 + NB :]
    y = b[0] * x
    if len(states) > 0:
        y += states[0]
    advanced = ()
    for k in tl.static_range(1, len(states) + 1):
        s = tl.zeros_like(x)
        if k < len(b):
            s = b[k] * x
        if k <= len(a):
            s -= a[k - 1] * y
        if k < len(states):
            s += states[k]
        advanced += (s,)  # type: ignore[assignment]
    return (y * taps[0],) + advanced  # noqa: RUF005 - Triton knows no starred expression
