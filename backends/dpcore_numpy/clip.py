"""The clip stage: norms, certified factors, and the weighted sum of per-example vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.check_rows import check_combined, check_factors, check_rows, check_weighted_sum
from dpcore.spec.grid import nearest
from dpcore.spec.ops import AUTOMATIC_STABILITY, LEAST_FACTOR, PSAC_STABILITY
from dpcore_numpy.arrays import at_least_float32
from dpcore_numpy.denormals import check_denormals

Floats = NDArray[Any]
Scales = Sequence[Floats | None] | None

_COLUMNS = 16384
# Entries of a block that are widened to float64 at once: such a piece stays in the processor's cache.
_PIECE = 1 << 17


def row_norms(rows: Sequence[Floats], scale: Scales = None) -> NDArray[np.float64]:
    """See `dpcore.spec.ops.Backend.row_norms`."""
    check_rows(rows, scale)
    check_denormals()
    examples = rows[0].shape[0]
    # Squares of float32 numbers fit float64; squares of float64 numbers are taken relative to the largest entry.
    largest = np.ones(examples)
    if any(block.dtype == np.float64 for block in (*rows, *(scale or ())) if block is not None):
        largest = np.zeros(examples)
        with np.errstate(all="ignore"):  # a warning would reveal something of one example
            for part, values in _pieces(rows, scale):
                largest[part] = np.maximum(largest[part], np.abs(values).max(axis=1, initial=0.0))
        largest[~np.isfinite(largest) | (largest == 0)] = 1.0
    relative, squares = bool((largest != 1.0).any()), np.zeros(examples)
    with np.errstate(all="ignore"):
        for part, values in _pieces(rows, scale):
            if relative:
                values /= largest[part, None]
            squares[part] += np.vecdot(values, values)
        norms: NDArray[np.float64] = largest * np.sqrt(squares)
    return norms


def _pieces(rows: Sequence[Floats], scale: Scales) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Yield the (scaled) vectors in float64: some columns of some of them at a time."""
    for block, vector in zip(rows, scale or [None] * len(rows), strict=True):
        for start in range(0, block.shape[1], _COLUMNS):
            columns = slice(start, start + _COLUMNS)
            height = max(1, _PIECE // max(1, min(_COLUMNS, block.shape[1] - start)))
            for first in range(0, block.shape[0], height):
                part = slice(first, first + height)
                values = block[part, columns].astype(np.float64)
                if vector is not None:
                    values *= vector[columns]
                yield part, values


def group_norms(rows: Sequence[Floats], groups: Sequence[int], scale: Scales = None) -> tuple[NDArray[np.float64], ...]:
    """See `dpcore.spec.ops.Backend.group_norms`."""
    return by_group(row_norms, rows, groups, scale)


def by_group(norms: Callable[..., Any], rows: Sequence[Any], groups: Sequence[int], scale: Any) -> tuple[Any, ...]:
    """Return the norms of each group by itself; torch's tensors, too."""
    check_rows(rows, scale, groups)
    members = [[i for i, own in enumerate(groups) if own == group] for group in range(max(groups) + 1)]
    return tuple(norms([rows[i] for i in own], None if scale is None else [scale[i] for i in own]) for own in members)


def combine(first: Sequence[Floats], second: Sequence[Floats], weights: tuple[float, float]) -> list[Floats]:
    """See `dpcore.spec.ops.Backend.combine`."""
    check_combined(first, second, weights)
    with np.errstate(all="ignore"):  # a warning of an overflow would reveal something of one example
        pairs = zip(map(at_least_float32, first), map(at_least_float32, second), strict=True)
        return [weights[0] * one + weights[1] * other for one, other in pairs]


def clip_factors(
    norms: Sequence[Floats],
    rule: str,
    bounds: Sequence[float],
    sizes: Sequence[int],
    roundings: Sequence[float],
    unit: float,
) -> tuple[NDArray[np.float64], ...]:
    """See `dpcore.spec.ops.Backend.clip_factors`."""
    check_factors(norms, rule, bounds, sizes, roundings, unit)
    finite = np.logical_and.reduce([np.isfinite(group) for group in norms])
    groups = zip(norms, bounds, sizes, roundings, strict=True)
    return tuple(np.where(finite, _certified(*group, rule, unit), 0.0) for group in groups)


def _certified(norms: Floats, bound: float, size: int, rounding: float, rule: str, unit: float) -> NDArray[np.float64]:
    """Return one group's weights.

    With N >= ||v|| the raised norm and C' = C - r u, a weight of w = C' / (N u) leaves an example within ``w N + r =
    C / u``. C' and the quotients round three times, the product with a vector twice, by 2^-53 each: C' is lowered by
    2^-50. If the denominator is N plus a number that is not negative, as in "automatic" and "psac", w is smaller: no
    sum of the two rounds below N. It does not matter that "psac" rises and falls with N, since N bounds the norm in
    this one place. A factor below 2^-1000 is 0: numbers near 2^-1074 lie so far apart that it could be half too large.
    """
    raised = norms * (1 + (size + 8) * 2.0**-53)
    longest = 1.0 if rule == "normalized" else bound
    lowered = (longest - rounding * unit) * (1 - 2.0**-50)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if rule == "standard":
            factor = np.where(raised <= lowered, 1.0, lowered / raised)
        elif rule == "automatic":
            factor = lowered / (raised + AUTOMATIC_STABILITY)
        elif rule == "psac":
            factor = lowered / (raised + PSAC_STABILITY / (raised + PSAC_STABILITY))
        elif rule == "automatic_v":
            factor = np.where(raised == 0, 0.0, lowered / raised)
        else:
            factor = lowered / np.maximum(raised, bound)
        weight: NDArray[np.float64] = np.minimum(factor / unit, np.finfo(np.float64).max)
        weight[factor < LEAST_FACTOR] = 0.0
    return weight


def weighted_sum(
    rows: Sequence[Floats],
    weights: Sequence[Floats],
    out: Sequence[Floats],
    scale: Scales = None,
    longest: Sequence[float] | None = None,  # noqa: ARG001
    *,
    overwrite: bool = False,
) -> None:
    """See `dpcore.spec.ops.Backend.weighted_sum`."""
    check_weighted_sum(rows, weights, out, scale)
    for block, weight, total, vector in zip(rows, weights, out, scale or [None] * len(rows), strict=True):
        if overwrite:
            total[...] = 0
        used = np.flatnonzero(weight)
        for first in range(0, block.shape[1], _COLUMNS):
            columns = slice(first, first + _COLUMNS)
            height = max(1, _PIECE // max(1, total[columns].size))
            for start in range(0, len(used), height):
                chosen = used[start : start + height]
                values = block[chosen, columns].astype(np.float64)
                if vector is not None:
                    values *= vector[columns]
                values *= weight[chosen, None]
                total[columns] += nearest(values).sum(axis=0)
