"""A checksum of a tensor: quick, and another one for any accidental change, also for values that change places.

Not for guarding against somebody who looks for collisions.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

# Integers of the width of a dtype, to add up bits.
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_COLUMNS = 1024

# Bytes up to which a SHA-256 is quicker than the calls of torch.
_SMALL = 2**14

# Odd constants of splitmix64, as signed integers.
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of all bits of a tensor, an int64 scalar on its device.

    The bits are added up by rows and by columns of a table, each sum is mixed with its place, and those are added up:
    two readings of the tensor, whatever its size. Of few bytes on a CPU it is a part of their SHA-256.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    if flat.device.type == "cpu" and flat.numel() * size <= _SMALL:
        content = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).digest()
        return torch.tensor(int.from_bytes(content[:8], "little", signed=True))
    if flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        bits = flat.view(torch.int64)  # as wide as the sums: several times as fast
    else:
        bits = flat.view(_BITS[size])
    count = bits.numel() // _COLUMNS
    whole = count * _COLUMNS
    table = bits[:whole].view(count, _COLUMNS)
    rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    sums = torch.cat([rows, columns, bits[whole:].to(torch.int64)])
    return _mixed(sums).sum()


def row_hashes(tensor: torch.Tensor) -> NDArray[np.int64]:
    """Return Python's hash of the bytes of each row, (n,): good for this process only."""
    table = tensor.detach().unsqueeze(-1).flatten(1).contiguous().cpu()
    if table.is_complex():
        table = torch.view_as_real(table).flatten(1)
    content = table.view(torch.uint8).numpy()
    return np.fromiter((hash(row.tobytes()) for row in content), np.int64, len(content))


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Mix each value with its place along the last dimension, as splitmix64 does."""
    places = torch.arange(1, values.shape[-1] + 1, device=values.device, dtype=torch.int64)
    mixed = values + places * _STEP
    mixed = (mixed ^ (mixed >> 30)) * _FIRST
    mixed = (mixed ^ (mixed >> 27)) * _SECOND
    return mixed ^ (mixed >> 31)
