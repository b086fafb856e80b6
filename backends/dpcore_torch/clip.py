"""Norms and weighted sums of rows: `dpcore_numpy.clip` in torch's threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

import dpcore_numpy as reference
from dpcore.spec.check_rows import check_combined, check_rows, check_weighted_sum
from dpcore_numpy.clip import by_group
from dpcore_torch.arithmetic import bounded
from dpcore_torch.arrays import at_least_float32, view

# Squares of longer rows are added in float32, over runs of this length.
_SHORT, _RUN = 2048, 64
# Entries that a thread widens to float64 at once: they stay in its processor's cache.
_PIECE = 1 << 17


Scales = Sequence[torch.Tensor | None] | None


@bounded()
def row_norms(rows: Sequence[torch.Tensor], scale: Scales = None) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.row_norms`.

    Notes
    -----
    Short rows are measured in float64. In other rows squares are added in float32 over runs of 64, and the root is
    taken. It is off by half of gamma_66, 2.0e-6, and a rounding, 6e-8; products with a scale round by as much. Squares
    that underflow lose 2^-126 each. If the norm is above 2^-40 and d below 2^26, that is less than 2^-20 of their sum,
    and the root loses half of it, 4.8e-7. The result is raised by 2^-18 = 3.8e-6. Other norms are taken in float64. An
    example's arithmetic follows from its own row: otherwise one example could raise the norms of all others, and so
    move the sum by their number times 2^-18.
    """
    check_rows(rows, scale)
    size = sum(block.shape[1] for block in rows)
    scales = list(scale or [None] * len(rows))
    if any(each is not None and each.dtype == torch.float64 for each in (*rows, *scales)) or size >= 1 << 26:
        return torch.from_numpy(reference.row_norms(view(rows), view(scale)))
    squares = torch.zeros(len(rows[0]), dtype=torch.float64, device="cpu")
    for block, vector in zip(rows, scales, strict=True):
        measure = _squares if block.shape[1] <= _SHORT else _squares_by_runs
        squares += measure(block.detach(), None if vector is None else vector.detach())
    norms = squares.sqrt_()
    if any(block.shape[1] > _SHORT for block in rows):
        norms.mul_(1 + 2.0**-18)
        others = ((norms < 2.0**-40) | ~torch.isfinite(norms)).nonzero()[:, 0]
        if len(others):
            norms[others] = torch.from_numpy(reference.row_norms([view(block[others]) for block in rows], view(scale)))
    return norms


def group_norms(rows: Sequence[torch.Tensor], groups: Sequence[int], scale: Scales = None) -> tuple[torch.Tensor, ...]:
    """See `dpcore.spec.ops.Backend.group_norms`."""
    return by_group(row_norms, rows, groups, scale)


def combine(
    first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], weights: tuple[float, float]
) -> list[torch.Tensor]:
    """See `dpcore.spec.ops.Backend.combine`."""
    check_combined(first, second, weights)
    pairs = zip(map(at_least_float32, first), map(at_least_float32, second), strict=True)
    return [weights[0] * one + weights[1] * other for one, other in pairs]


def _squares(block: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    squares = torch.zeros(len(block), dtype=torch.float64, device="cpu")
    for examples, columns, piece in pieces(block, _SHORT):
        if scale is not None:
            piece *= scale[columns]
        squares[examples] = torch.linalg.vector_norm(piece, dim=1).square_()
    return squares


def _squares_by_runs(block: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if block.dtype.itemsize == 2:  # some rows at a time
        parts = torch.split(block, max(1, _piece() // block.shape[1]))
        return torch.cat([_squares_by_runs(part.float(), scale) for part in parts])
    if scale is not None:
        block = block * scale
    count, whole = len(block), block.shape[1] // _RUN * _RUN
    runs = torch.linalg.vector_norm(block[:, :whole].view(count, whole // _RUN, _RUN), dim=2).double().numpy()
    # torch adds the entries of a single row in several threads.
    squares: torch.Tensor = torch.from_numpy(np.vecdot(runs, runs))
    return squares.add_(torch.linalg.vector_norm(block[:, whole:].double(), dim=1).square_())


@bounded()
def weighted_sum(
    rows: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    scale: Scales = None,
    longest: Sequence[float] | None = None,  # noqa: ARG001
    *,
    overwrite: bool = False,
    add: Callable[..., None] | None = None,
) -> None:
    """See `dpcore.spec.ops.Backend.weighted_sum`; `add` is another `add_rows`."""
    check_weighted_sum(rows, weights, out, scale)
    for block, weight, total, vector in zip(rows, weights, out, scale or [None] * len(rows), strict=True):
        if overwrite:
            total.zero_()
        (add or add_rows)(block.detach(), total, weight.detach(), None if vector is None else vector.detach())


def add_rows(
    block: torch.Tensor, total: torch.Tensor, weights: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> None:
    """Add a block's rows, rounded to integers, or rounded once float64 weights and a scale have multiplied them.

    A row of weight 0 is left out, whatever it holds. Without weights and a scale the block itself is rounded, in its
    own dtype, which holds the nearest integer of each of its numbers.
    """
    if weights is None and scale is None:
        for row in block.round_().unbind():
            total.add_(row)
        return
    ones = torch.ones(len(block), dtype=torch.float64, device="cpu")
    unused = torch.empty(0, device="cpu") if weights is None else (weights == 0).nonzero()[:, 0]
    for examples, columns, piece in pieces(block, max(256, _piece() // max(1, len(block)))):
        if scale is not None:
            piece *= scale[columns]
        if weights is not None:
            piece.mul_(weights[examples, None])
        piece.round_()
        if len(unused):
            piece[unused[(unused >= examples.start) & (unused < examples.stop)] - examples.start] = 0.0
        total[columns].addmv_(piece.T, ones[examples])


def pieces(block: torch.Tensor, width: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield examples, columns, and these entries of a block in float64; the next ones overwrite their memory."""
    count, size = block.shape
    width = max(1, min(width, size))
    scratch = torch.empty(min(block.numel(), max(_piece(), width)), dtype=torch.float64, device="cpu")
    height = max(1, len(scratch) // width)
    for start in range(0, size, width):
        columns = slice(start, min(start + width, size))
        for first in range(0, count, height):
            part = block[first : first + height, columns]
            piece = scratch[: part.numel()].view(part.shape).copy_(part)
            yield slice(first, first + len(part)), columns, piece


def _piece() -> int:
    return _PIECE * torch.get_num_threads()
