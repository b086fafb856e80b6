"""The norm of vectors side by side, from theirs: all groups in one launch."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import triton.language as tl

from dpcore.spec.check_rows import check_joined
from dpcore_triton.launch import COLUMNS, common_device, jit, kernel, launch, rows_of
from dpcore_triton.pairs import bits, number
from dpcore_triton.row_norms import contiguous

Tensor = torch.Tensor


def joined_norms(norms: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """See `dpcore.spec.pair_ops.PairOperations.joined_norms`; `dpcore_numpy.joined` derives it."""
    check_joined(norms)
    members = [contiguous(own) for own in chain.from_iterable(norms)]
    device, counts = common_device(norms=members), [len(group) for group in norms]
    if max(counts) == 1:
        return tuple(members)
    examples = members[0].shape[0]
    found = torch.empty((len(norms), examples), dtype=torch.float64, device=device)
    places = rows_of([(own.data_ptr(),) for own in members], [1] * len(members), device)
    groups = rows_of([(count, bits(raising(count))) for count in counts], counts, device)
    grid = (len(norms) * -(-examples // COLUMNS),)
    launch(_joined_kernel, grid, device, places, groups, found, examples, EXAMPLES=COLUMNS)
    return found.unbind()


def raising(count: int) -> float:
    """Return the factor that raises the rounded norm of `count` vectors."""
    return 1 + (count + 8) * 2.0**-53


@kernel("examples")
def _joined_kernel(places, groups, found, examples, EXAMPLES: tl.constexpr):
    programs = (examples + EXAMPLES - 1) // EXAMPLES
    group = (tl.program_id(0) // programs).to(tl.int64)
    example = tl.program_id(0) % programs * EXAMPLES + tl.arange(0, EXAMPLES)
    mask, row = example < examples, groups + group * 3
    start = tl.load(row)
    stop, member = start + tl.load(row + 1), start + 1
    first = norm_at(places, start, example, mask)
    total = first
    while member < stop:
        total += norm_at(places, member, example, mask)
        member += 1
    total = tl.where(total == 0, 1.0, total)
    member, squares = start + 1, (first / total) * (first / total)
    while member < stop:
        share = norm_at(places, member, example, mask) / total
        squares += share * share
        member += 1
    raised = total * tl.sqrt(squares) * number(row, 2)
    # A single vector keeps its norm.
    tl.store(found + (group * examples + example), tl.where(stop == start + 1, first, raised), mask=mask)


@jit
def norm_at(places, member, example, mask):
    """Return a member's norms of these examples."""
    return tl.load(tl.load(places + member * 2 + 1).to(tl.pointer_type(tl.float64)) + example, mask=mask, other=0.0)
