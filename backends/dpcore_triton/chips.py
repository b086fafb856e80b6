"""The chips whose tensor cores are known, and their peaks: what decides how a layer is multiplied."""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from dpcore.errors import SpeedWarning
from dpcore_triton.launch import INTERPRETED


class Chip(NamedTuple):
    """Peaks of NVIDIA's data sheets, dense."""

    bfloat16: float  #: of products, float32 sums: 1e12 operations a second
    float64: float  #: likewise, on tensor cores where it has them
    bandwidth: float  #: 1e12 bytes a second
    #: Whether 64 rows of a tile are too few: a multiprocessor multiplies 2048 numbers a cycle, and the cache gives it
    #: some 40 bytes.
    wide: bool = False


#: All are of compute capability 8.0 to 9.0, whose rounding `dpcore_triton.cores` bounds.
CHIPS: Final = {
    "H200": Chip(989, 67, 4.8, wide=True),
    "H100": Chip(989, 67, 3.35, wide=True),
    "A100": Chip(312, 19.5, 2.0),
    "L4": Chip(121, 0.49, 0.3),
    "4090": Chip(165, 1.29, 1.01),
}


def chip_of(device: torch.device) -> Chip | None:
    """Return the peaks of a device's chip; None where it is not known, in the interpreter among others."""
    known = not INTERPRETED and torch.device(device).type == "cuda"
    return _named(torch.cuda.get_device_name(device)) if known else None


@lru_cache
def _named(name: str) -> Chip | None:
    found = [CHIPS[word] for word in re.split(r"[^A-Z0-9]+", name.upper()) if word in CHIPS]
    if not found:
        warnings.warn(
            f"{name}: how its tensor cores round is not known, so that linear layers are multiplied in float64, which "
            f"is slow; known are {', '.join(CHIPS)}",
            SpeedWarning,
            stacklevel=2,
        )
    return found[0] if found else None
