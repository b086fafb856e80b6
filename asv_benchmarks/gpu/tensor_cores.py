"""How the tensor cores at hand round, beside what `dpcore_triton.cores` assumes of them: the norms rest on it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dpcore_triton.cores import BLOCK, CHAIN, CORE_DEPTH, product, read

from .runner import Setting

SIDE = 64
DEPTHS = int(CORE_DEPTH.value), CHAIN
"""Products that are added on the tensor core from 0."""


@triton.jit
def _product_kernel(x, y, out, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    row, column, inner = tl.arange(0, SIDE), tl.arange(0, SIDE), tl.arange(0, DEPTH)
    left = read(x + row[:, None] * DEPTH + inner[None, :], (row >= 0)[:, None] & (inner >= 0)[None, :])
    right = read(y + inner[:, None] * SIDE + column[None, :], (inner >= 0)[:, None] & (column >= 0)[None, :])
    found = product(left, right, tl.zeros((SIDE, SIDE), tl.float32))
    tl.store(out + row[:, None] * SIDE + column[None, :], found)


def _built_to_round(draw: torch.Generator, trial: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors: random ones, mantissas of ones, and a large term first with others near its last digits."""
    x, y = torch.randn((SIDE, depth), generator=draw), torch.randn((depth, SIDE), generator=draw)
    if trial % 4 == 1:
        x, y = torch.full_like(x, 1 - 2.0**-8), torch.full_like(y, 1 - 2.0**-8) * 2.0 ** (trial % 3)
    if trial % 4 >= 2:
        x[:, 1:], y[1:] = (1 - 2.0**-8) * 2.0**-12, (1 - 2.0**-8) * 2.0 ** -(10 + trial // 4 % 5)
        x[:, 0], y[0] = 1, 1
        if trial % 4 == 3:
            x[:, depth // 2], y[depth // 2] = 1, -1
    return x, y


def rounding(setting: Setting) -> dict[str, Any]:
    """Fail where products of 16-bit numbers are off by more than is assumed; return the share of it that they take."""
    draw, worst = torch.Generator().manual_seed(1), {}
    for kind in (torch.bfloat16, torch.float16):
        shares = [0.0]
        for trial in range(8 if setting.small else 2000):
            depth = DEPTHS[trial // 4 % 2]
            x, y = (each.to(kind).to(setting.device) for each in _built_to_round(draw, trial, depth))
            out = torch.empty((SIDE, SIDE), device=setting.device)
            _product_kernel[(1,)](x, y, out, SIDE=SIDE, DEPTH=depth)
            error, sizes = (out.double() - x.double() @ y.double()).abs(), x.double().abs() @ y.double().abs()
            shares.append(float((error / sizes).max()) / (depth / 16 * BLOCK))
        worst[str(kind)] = max(shares)
        if not worst[str(kind)] <= 1:
            raise AssertionError(f"{kind}: products are off by {worst[str(kind)]:.2f} of what norms assume")
    return {"share_of_the_bound": worst}
