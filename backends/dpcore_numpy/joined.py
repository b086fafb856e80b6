"""The norm of vectors side by side, from theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpcore.spec.check_rows import check_joined
from dpcore_numpy.pairs import Wide


def joined_norms(norms: Sequence[Sequence[Wide]]) -> tuple[Wide, ...]:
    """See `dpcore.spec.pair_ops.PairOperations.joined_norms`.

    Notes
    -----
    With N_l the norm of member l, s the computed sum of the L norms and u = 2^-53, the result is ``s sqrt(sum_l (N_l /
    s)^2)``: relative to s no square overflows, and those that underflow are below 2^-1000 of the sum. Quotients,
    squares, their sum, root and product round it by at most (L / 2 + 3) u, by which it is raised.
    """
    check_joined(norms)
    with np.errstate(all="ignore"):  # a warning of an overflow would reveal something of one example
        return tuple(_joined(group) for group in norms)


def _joined(norms: Sequence[Wide]) -> Wide:
    if len(norms) == 1:
        return norms[0]
    total = sum(norms[1:], norms[0])
    total = total + (total == 0)
    squares = [np.square(norm / total) for norm in norms]
    raised: Wide = total * np.sqrt(sum(squares[1:], squares[0])) * raising(len(norms))
    return raised


def raising(count: int) -> float:
    """Return the factor that raises the rounded norm of `count` vectors."""
    return 1 + (count + 8) * 2.0**-53
