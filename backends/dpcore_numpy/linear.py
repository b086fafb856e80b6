"""Weights of linear maps: norms of ``sum_t e_t a_t^T`` without forming it for all examples, and weighted sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.check_pairs import check_layers, check_sums
from dpcore.spec.contributions import CANCELLATION, FACTOR_BITS, FEW_ROWS
from dpcore.spec.pair_ops import LinearPairs
from dpcore_numpy.clip import row_norms
from dpcore_numpy.denormals import check_denormals
from dpcore_numpy.gram import few, gram_narrow, gram_wide
from dpcore_numpy.pairs import U64, Bound, Floats, Indices, Side, Wide, gamma, rounding_of
from dpcore_numpy.tiles import add_tiles, tile_norms

# Up to this number of rows of an example, norms are by float64 inner products; from `FEW_ROWS` on tiles and inner
# products are float32.
_FEW = 8


class Arithmetic(NamedTuple):
    """The functions that multiply. Another library's have the same bounds, which hold for any order of additions."""

    side: type[Side]
    row_norms: Callable[[Sequence[Floats]], Wide]
    gram_narrow: Callable[[Side, Side], tuple[Wide, Wide]]
    tile_norms: Callable[[Side, Side, Floats | None, bool], tuple[Wide, Wide]]
    add_tiles: Callable[[Side, Side, Wide, Indices, Any, Floats | None, bool], None]
    #: Adds few rows by factors that are integers, as `dpcore.spec.contributions` says; without it they are tiles, too.
    add_factors: Callable[[Side, Side, Wide, Indices, Any], None] | None = None


def linear_way(layer: LinearPairs[Any], device: Any, *, scaled: bool = False) -> str:  # noqa: ARG001
    """See `dpcore.spec.pair_ops.PairOperations.linear_way`."""
    if layer.exact:
        return "float64"
    few = sum(int(part.shape[1]) for part in layer.inputs) <= _FEW
    return "inner products" if few or (layer.gram and not scaled) else "tiles"


def prefers_pairs(layer: LinearPairs[Any], device: Any) -> bool:  # noqa: ARG001
    """See `dpcore.spec.pair_ops.PairOperations.prefers_pairs`: the caller's rule was found on CPUs."""
    return False


def sliced_rounding(layer: LinearPairs[Any], longest: float, *, scaled: bool = False) -> float:  # noqa: ARG001
    """See `dpcore.spec.pair_ops.PairOperations.sliced_rounding`: no layer is added by coarser factors."""
    return 0.0


def copies_halves(layer: LinearPairs[Any] | None, device: Any, *, scaled: bool = False) -> bool:  # noqa: ARG001
    """See `dpcore.spec.pair_ops.PairOperations.copies_halves`: they are read a piece at a time."""
    return False


def linear_norms(
    layers: Sequence[LinearPairs[Floats]],
    scales: Sequence[Floats | None] | None = None,
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[Wide, ...]:
    """See `dpcore.spec.pair_ops.PairOperations.linear_norms`."""
    check_layers(layers, scales)
    check_denormals()
    by, given = arithmetic or NUMPY, scales or [None] * len(layers)
    with np.errstate(all="ignore"):  # a warning would reveal something of one example
        return tuple(_norms(layer, scale, by) for layer, scale in zip(layers, given, strict=True))


def _norms(layer: LinearPairs[Floats], scale: Floats | None, by: Arithmetic) -> Wide:
    a, e = by.side(layer.inputs), by.side(layer.gradients, layer.point_weights)
    bound = linear_bound(a, e, scale, layer.gram, layer.exact, by=by)
    return raised_for_terms(bound.norms, bound) + bound.rounding


def raised_for_terms(norms: Wide, bound: Bound) -> Wide:
    """Return the norms; if an example's terms enter a sum one by one, at least `CANCELLATION` times their sum."""
    raised: Wide = np.where(bound.factors, np.maximum(norms, CANCELLATION * bound.terms), norms)
    return raised


def linear_bound(
    a: Side,
    e: Side,
    scale: Floats | None = None,
    gram: bool = False,
    exact: bool = False,
    *,
    by: Arithmetic,
) -> Bound:
    """Return the parts of `linear_norms`.

    Notes
    -----
    Let S be the sum of the terms' norms ``sum_t |a_t| |e_t|`` (times the scale), u the unit roundoff of the arithmetic.
    A product over T rows, whatever the order of its additions, rounds a coordinate by at most gamma_{T+3} times the sum
    of its terms' sizes (weights round e_t twice). So the vector moves by gamma_{T+3} S at most.
    """
    wide = exact or a.double
    if scale is None and not wide and len(a.parts) == a.time == 1:
        return _of_one_row(a, e, by)
    if scale is not None and a.time <= _FEW:
        norms, terms = few(a, e, scale)
    elif scale is None and (gram or a.time <= _FEW):
        norms, terms = gram_wide(a, e) if wide or a.time < FEW_ROWS else by.gram_narrow(a, e)
    else:
        norms, terms = by.tile_norms(a, e, scale, wide)
    rounding = rounding_of(a, e, scale, terms, wide or a.time < FEW_ROWS)
    factored = by_factors(a, e, scale, exact, by)
    rounding += _of_factors(a) * terms * factored
    # 2^-480 covers squares and products that underflow; their numbers are relative to the largest. A side of zeros
    # makes a vector of zeros, unless the other side is not finite.
    sizes = a.measured[1].sum(axis=1) * e.measured[1].sum(axis=1)
    unit, exponent = math.frexp(abs(e.unit) * (1 + 8 * U64))
    exponents = exponent + a.measured[0] + e.measured[0]
    parts = (np.ldexp(x * unit, exponents) + 5e-324 for x in (norms + 2.0**-480, rounding, terms))
    norms, rounding, terms = (np.where(sizes == 0, 0.0, x) for x in parts)
    return Bound(norms, rounding, terms, factored)


def _of_one_row(a: Side, e: Side, by: Arithmetic) -> Bound:
    """Return the parts for one row: ``|a| |e|``, whose float32 numbers float64 holds as they are."""
    x, y = (by.row_norms([side.parts[0][:, 0]]) for side in (a, e))
    norms = abs(e.unit) * x * y * (1 + gamma(a.width + e.width + 20, U64))
    factored = np.full(a.examples, by.add_factors is not None)
    return Bound(norms, (gamma(9, U64) + _of_factors(a) * factored) * norms, norms, factored)


def _of_factors(a: Side) -> float:
    """Return how far rounding a row to factors moves its term, as a share; its norm is known to 2^-10."""
    return 2.0**-FACTOR_BITS * math.sqrt(a.width) / 2 * (1 + 2.0**-8)


def linear_sums(
    layers: Sequence[LinearPairs[Floats]],
    weights: Sequence[Floats],
    out: Sequence[Floats],
    scales: Sequence[Floats | None] | None = None,
    longest: Sequence[float] | None = None,
    *,
    overwrite: bool = False,
    arithmetic: Arithmetic | None = None,
) -> None:
    """See `dpcore.spec.pair_ops.PairOperations.linear_sums`; factors of two bytes would be no faster here."""
    check_layers(layers, scales)
    check_sums(layers, weights, out, longest)
    by, given = arithmetic or NUMPY, scales or [None] * len(layers)
    with np.errstate(all="ignore"):
        for layer, factors, total, scale in zip(layers, weights, out, given, strict=True):
            if overwrite:
                total[...] = 0
            _add(layer, factors, total, scale, by)


def _add(layer: LinearPairs[Floats], weights: Floats, out: Floats, scale: Floats | None, by: Arithmetic) -> None:
    a, e = by.side(layer.inputs), by.side(layer.gradients, layer.point_weights)
    total, used = out.reshape(e.width, a.width), np.flatnonzero(weights)
    factor = None if scale is None else scale.reshape(e.width, a.width)
    factored, wide = by_factors(a, e, scale, layer.exact, by)[used], layer.exact or a.double or a.time < FEW_ROWS
    if by.add_factors is not None and factored.any():
        by.add_factors(a, e, weights, used[factored], total)
    if not factored.all():
        by.add_tiles(a, e, weights, used[~factored], total, factor, wide)


def by_factors(a: Side, e: Side, scale: Floats | None, exact: bool, by: Arithmetic) -> NDArray[np.bool_]:
    """Return which examples are added by factors: those with few rows whose terms do not cancel beyond `CANCELLATION`.

    Their norms are raised for it. With `exact` an example that cancels is added as a tile instead. The test is against
    twice the share, since a norm of another kind may be smaller than this one, by at most that factor.
    """
    if by.add_factors is None or scale is not None or a.time >= FEW_ROWS:
        return np.zeros(a.examples, np.bool_)
    if a.time <= 1 or not exact:
        return np.ones(a.examples, np.bool_)
    norms, terms = gram_wide(a, e)
    alike: NDArray[np.bool_] = norms >= 2 * CANCELLATION * terms
    return alike


NUMPY = Arithmetic(Side, row_norms, gram_narrow, tile_norms, add_tiles)
