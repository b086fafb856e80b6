"""The clipped sum of a micro-batch: norms, factors and weighted sums of a whole model's blocks, kind by kind."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dpcore.spec.ops import Backend
from dpcore.spec.pair_ops import LinearPairs
from dpcore.stages.clipping.blocks import Block, Linear, Rows
from dpcore.stages.clipping.clip import Grouping


def norms_of(
    backend: Backend[Any], blocks: Sequence[Block], groups: Sequence[Sequence[int]], scales: Sequence[Any]
) -> list[Any]:
    """Return N_i of the concatenation of some tensors' blocks, for each group of tensors (B,) float64.

    Parameters
    ----------
    backend : Backend
    blocks : sequence of Block
        One for each tensor.
    groups : sequence of sequences of int
        Which of them belong to each group.
    scales : sequence of (d_l,) arrays or None
        One for each tensor: the factors of its block.

    Notes
    -----
    The rows of a group are one vector. The port takes the norms of all groups in one operation, those of all linear
    layers in another, whatever their groups, and joins the norms of each group in a third.
    """
    _, layers, others = _apart(blocks, [i for members in groups for i in members])
    own = {i: blocks[i].norms(backend, scales[i]) for i in others}
    if layers:
        of_layers = backend.linear_norms([*layers.values()], [scales[i] for i in layers])
        own |= zip(layers, of_layers, strict=True)
    rows, of_groups = list[tuple[int, int]](), list[list[Any]]()
    for members in groups:
        rows += [(len(of_groups), i) for i in members if i not in own]
        of_groups.append([own[i] for i in members if i in own])
    if rows:
        with_rows = list(dict.fromkeys(group for group, _ in rows))
        number = {group: k for k, group in enumerate(with_rows)}
        values, given = [blocks[i].rows() for _, i in rows], [scales[i] for _, i in rows]
        norms = backend.group_norms(values, [number[group] for group, _ in rows], given)
        for group, norm in zip(with_rows, norms, strict=True):
            of_groups[group].insert(0, norm)
    return list(backend.joined_norms(of_groups))


def add_sums(
    backend: Backend[Any],
    blocks: Sequence[Block],
    weights: Sequence[Any],
    totals: Sequence[Any],
    scales: Sequence[Any],
    longest: Sequence[float] | None = None,
    overwrite: bool = False,
) -> None:
    """Add each block's sum, weighted and times its scale, to the tensor's total: rows by one operation, layers too.

    `longest` are bounds on each tensor's addends, in steps of the grid: see `PairOperations.linear_sums`. With
    `overwrite` the sums take the place of what the totals hold.
    """
    rows, layers, others = _apart(blocks, range(len(blocks)))

    def of(kind: Iterable[int]) -> tuple[list[Any], list[Any], list[Any], list[float] | None]:
        chosen = list(kind)
        bounds = None if longest is None else [longest[i] for i in chosen]
        return [weights[i] for i in chosen], [totals[i] for i in chosen], [scales[i] for i in chosen], bounds

    if rows:
        backend.weighted_sum([blocks[i].rows() for i in rows], *of(rows), overwrite=overwrite)
    if layers:
        backend.linear_sums([*layers.values()], *of(layers), overwrite=overwrite)
    if overwrite and others:
        backend.clear([totals[i] for i in others])
    for i in others:
        blocks[i].add_sum(backend, weights[i], totals[i], scales[i], None if longest is None else longest[i])


def _apart(blocks: Sequence[Block], members: Iterable[int]) -> tuple[list[int], dict[int, LinearPairs[Any]], list[int]]:
    """Return the members that are rows, those that are linear layers (one operation takes all), and the others."""
    rows, layers, others = list[int](), dict[int, LinearPairs[Any]](), list[int]()
    for i in members:
        block = blocks[i]
        if isinstance(block, Rows):
            rows.append(i)
        elif isinstance(block, Linear):
            layers[i] = block.layer
        else:
            others.append(i)
    return rows, layers, others


def add_clipped(
    backend: Backend[Any],
    blocks: Sequence[Block],
    rule: str,
    grouping: Grouping,
    sizes: Sequence[int],
    unit: float,
    totals: Sequence[Any],
    scales: Sequence[Any],
    add_sums: Callable[..., None],
    overwrite: bool = False,
) -> Any:
    """Add each example's vector to `totals` in place, scaled and clipped; return the norms in the first group, (B,).

    A function of its arguments only, so that a backend may repeat it (`dpcore.spec.ops.Backend.repeat`).

    Parameters
    ----------
    rule : str
        See `dpcore.spec.ops.Backend.clip_factors`.
    sizes : sequence of int
        Coordinates of each group.
    unit : float
        The grid's step: the value of one unit of the sum's integers.
    totals, scales : sequences of (d_l,) arrays
        One for each tensor, as the blocks: float64 integers that are added to, and a scale or None.
    add_sums : callable
        See `dpcore.mechanism.peers.Peers.add_sums`.
    overwrite : bool
        Whether what the totals hold does not count.
    """
    norms = norms_of(backend, blocks, grouping.members, scales)
    roundings = roundings_of(backend, blocks, rule, grouping, unit, scales)
    factors = backend.clip_factors(norms, rule, grouping.bounds, sizes, roundings, unit)
    weights: list[Any] = [None] * len(blocks)
    longest = [0.0] * len(blocks)
    for members, factor, bound in zip(grouping.members, factors, _longest(rule, grouping, unit), strict=True):
        for i in members:
            weights[i], longest[i] = factor, bound
    add_sums(backend, blocks, weights, totals, scales, longest, overwrite)
    return norms[0]


def _longest(rule: str, grouping: Grouping, unit: float) -> list[float]:
    """Return, for each group, the norm in the grid's steps that no clipped vector exceeds."""
    return [(1.0 if rule == "normalized" else bound) / unit for bound in grouping.bounds]


def roundings_of(
    backend: Backend[Any],
    blocks: Sequence[Block],
    rule: str,
    grouping: Grouping,
    unit: float,
    scales: Sequence[Any],
) -> list[float]:
    """Return how far, in the grid's steps, rounding moves an example's addend to each group."""

    def of(i: int, longest: float) -> float:
        block = blocks[i]
        if not isinstance(block, Linear):
            return block.rounding
        return max(block.rounding, backend.sliced_rounding(block.layer, longest, scaled=scales[i] is not None))

    bounds = _longest(rule, grouping, unit)
    groups = zip(grouping.members, bounds, strict=True)
    return [math.hypot(*(of(i, longest) for i in members)) for members, longest in groups]
