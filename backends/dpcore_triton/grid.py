"""Rounding to the grid of a release: what an example adds, and what its noise is, are integers."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton.language as tl

from dpcore_triton.launch import jit

INTEGER = tl.constexpr(1.5 * 2.0**52)


@jit
def nearest(x):
    """See `dpcore.spec.grid.nearest`. `x` is rounded before: launches let no product become one with the addition."""
    return (x + INTEGER) - INTEGER
