"""Standard normals: `dpcore_numpy.noise` in torch's threads."""

from __future__ import annotations

import math

import numpy as np
import torch

import dpcore_numpy as reference
from dpcore.spec.stream import TILE
from dpcore_numpy.noise import TAIL_BOUND, refine_tail
from dpcore_numpy.stream import tile_blocks

_SIGN = -(2**31)


def normal(
    key: bytes, row: int, stream: int, start: int, size: int, *, dtype: str = "float32", rng: str = "chacha20"
) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.normal`."""
    if dtype != "float32":
        return torch.from_numpy(reference.normal(key, row, stream, start, size, dtype=dtype, rng=rng))
    first, last = start // TILE, -(-(start + size) // TILE)
    blocks = tile_blocks(key, row, stream, first, last - first, rng=rng).view(np.int32)
    words = torch.from_numpy(blocks).transpose(1, 2)
    w0, w1 = words[:, 0::2].contiguous(), words[:, 1::2].contiguous()
    log_u = _log_uniform(w0)
    for tile in _tiles_with_tail(w0):
        (tail,) = tile_blocks(key, row, stream, first + tile, 1, tail=True, rng=rng).transpose(0, 2, 1)
        refine_tail(log_u[tile].numpy(), w0[tile].numpy().view(np.uint32), tail[0::2])
    rho = log_u.mul_(-2).sqrt_()
    z = torch.empty(words.shape, dtype=torch.float32, device="cpu")
    torch.mul(rho, _sine(w1), out=z[:, 1::2])
    torch.mul(rho, _sine(w1.add_(2**30)), out=z[:, 0::2])
    return z.view(-1)[start - first * TILE :][:size]


def _tiles_with_tail(w0: torch.Tensor) -> list[int]:
    """Return the tiles with a word below the bound, which as a signed number is none below 0."""
    words = w0.numpy().view(np.uint32)
    if words.min(initial=TAIL_BOUND) >= TAIL_BOUND:  # takes a tenth of the time of what follows
        return []
    return np.flatnonzero((words < TAIL_BOUND).any(axis=(1, 2))).tolist()


def _log_uniform(w0: torch.Tensor) -> torch.Tensor:
    """See `dpcore_numpy.noise._log_uniform`."""
    upper = w0 >> 31
    v = (w0 ^ upper).to(torch.float32).add_(0.5).mul_(2.0**-32)
    chosen = torch.log(v)
    bits = v.neg_().log1p_().view(torch.int32).bitwise_xor_(chosen.view(torch.int32)).bitwise_and_(upper)
    chosen.view(torch.int32).bitwise_xor_(bits)
    return chosen


def _sine(turn: torch.Tensor) -> torch.Tensor:
    """See `dpcore_numpy.noise._sine`."""
    doubled = turn << 1
    sine = doubled.to(torch.float32).mul_(math.pi * 2.0**-32).sin_()
    sine.view(torch.int32).bitwise_xor_(doubled.bitwise_xor_(turn).bitwise_and_(_SIGN))
    return sine
