"""Checks of the operations on rows that every backend makes: norms, factors and weighted sums."""

import math
from collections.abc import Sequence
from typing import Any

from dpcore.errors import ArgumentError
from dpcore.spec.check import check_count, check_float, check_outputs, read_as
from dpcore.spec.contributions import MOST_ROUNDED
from dpcore.spec.memory import Named, check_device, listed
from dpcore.spec.ops import CLIP_RULES
from dpcore.spec.validate import choice, integer, positive


def check_rows(rows: Sequence[Any], scale: Sequence[Any] | None, groups: Sequence[int] | None = None) -> None:
    """Refuse blocks that are not (B, d_l) of one B, scales that are not (d_l,), and groups without a block."""
    _check_shapes(rows, scale, groups)
    check_device([*listed("rows", rows), *_present(scale)])


def _check_shapes(rows: Sequence[Any], scale: Sequence[Any] | None, groups: Sequence[int] | None = None) -> None:
    if not rows:
        raise ArgumentError("rows=[]: must have at least one block of shape (B, d)")
    for index, block in enumerate(rows):
        check_float(f"rows[{index}]", block, halves=True)
        if len(block.shape) != 2:
            raise ArgumentError(f"rows[{index}].shape={tuple(block.shape)}: must be (B, d), one row for each example")
        check_float(f"rows[{index}]", block, None, (rows[0].shape[0], block.shape[1]), halves=True)
    if scale is not None:
        check_count("scale", scale, len(rows), "one for each block of rows")
        for index, vector in enumerate(scale):
            if vector is not None:
                check_float(f"scale[{index}]", vector, None, (rows[index].shape[1],))
    if groups is not None:
        check_count("groups", groups, len(rows), "one for each block of rows")
        count = max(integer(0, group=group) for group in set(groups)) + 1
        missing = set(range(count)) - set(groups)
        if missing:
            raise ArgumentError(f"groups={list(groups)}: group {min(missing)} must have a block, as each below {count}")


def check_combined(first: Sequence[Any], second: Sequence[Any], weights: tuple[float, float]) -> None:
    """Refuse blocks that are not of one shape and dtype, two by two, and weights that are no two finite numbers."""
    check_rows(first, None)
    check_count("second", second, len(first), "one for each block of first")
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        check_float(f"second[{index}]", other, read_as(one), tuple(one.shape), halves=True)
    check_device([*listed("first", first), *listed("second", second)])
    check_count("weights", weights, 2, "of first and second")
    if not all(math.isfinite(weight) for weight in weights):
        raise ArgumentError(f"weights={weights}: must be finite")


def check_joined(norms: Sequence[Sequence[Any]]) -> None:
    """Refuse groups without a member, and norms that are not (B,) of float64."""
    if not norms or not all(norms):
        raise ArgumentError(
            f"norms: {len(norms)} groups: must be at least one, each with one array of shape (B,) or more"
        )
    _check_norms([norm for group in norms for norm in group])


def _check_norms(norms: Sequence[Any]) -> None:
    """Refuse norms that are not (B,) of float64, of one B and on one device."""
    for index, array in enumerate(norms):
        check_float(f"norms[{index}]", array, "float64")
        if len(array.shape) != 1:
            raise ArgumentError(f"norms[{index}].shape={tuple(array.shape)}: must be (B,), one norm for each example")
        check_float(f"norms[{index}]", array, "float64", tuple(norms[0].shape))
    check_device(listed("norms", norms))


def check_factors(
    norms: Sequence[Any],
    rule: str,
    bounds: Sequence[float],
    sizes: Sequence[int],
    roundings: Sequence[float],
    unit: float,
) -> None:
    """Refuse norms that are not G arrays (B,) of float64, bounds that are not positive, and a grid too coarse."""
    choice(CLIP_RULES, rule=rule)
    positive(unit=unit)
    if not norms:
        raise ArgumentError("norms=[]: must have one array of shape (B,) for each group")
    _check_norms(norms)
    check_count("bounds", bounds, len(norms), "one for each group")
    check_count("sizes", sizes, len(norms), "one for each group")
    check_count("roundings", roundings, len(norms), "one for each group")
    for size in sizes:
        integer(0, size=size)
    check_roundings(rule, bounds, roundings, unit)


def check_roundings(rule: str, bounds: Sequence[float], roundings: Sequence[float], unit: float) -> None:
    """Refuse a grid so coarse that rounding to it takes much of a group's clip norm."""
    for bound, rounding in zip(bounds, roundings, strict=True):
        positive(max_grad_norm=bound)
        longest = 1.0 if rule == "normalized" else bound
        if not rounding * unit <= MOST_ROUNDED * longest:
            raise ArgumentError(
                f"noise_multiplier: is so large that the grid of its noise, steps of {unit:.3g}, moves what an example "
                f"adds by {rounding * unit / longest:.2g} of the clip norm {longest:.3g}: take less noise, or a larger "
                "clip norm for this group"
            )


def check_weighted_sum(
    rows: Sequence[Any], weights: Sequence[Any], out: Sequence[Any], scale: Sequence[Any] | None = None
) -> None:
    """Refuse weights that are not (B,) and outputs that are not contiguous (d_l,) of float64."""
    _check_shapes(rows, scale)
    read = [*listed("rows", rows), *_present(scale)]
    sizes = [block.shape[1] for block in rows]
    check_outputs(rows[0].shape[0], sizes, weights, out, "one for each block of rows", read)


def _present(scale: Sequence[Any] | None) -> list[Named]:
    return [named for named in listed("scale", scale or ()) if named[1] is not None]
