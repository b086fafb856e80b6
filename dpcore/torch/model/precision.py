"""The precision of a model's forward pass, if the run decides it: torch's autocast, of only the pass and the loss.

torch advises against autocast around a backward pass, whose operations have the dtypes of the forward pass by
themselves. If a precision is given, autocast around the run's calls changes nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from dpcore.errors import ArgumentError

PRECISIONS = {"bf16": torch.bfloat16}
CAVEAT = "Gradients come from forward passes in {} (autocast), and are clipped as they were computed."
"""A sentence of the statement."""


def parse(precision: str | None) -> torch.dtype | None:
    """Return the dtype of a precision's name; None if the surrounding autocast decides."""
    if precision in (None, *PRECISIONS):
        return None if precision is None else PRECISIONS[precision]
    scaled = "; gradients in float16 need a loss scale, and one that follows from gradients follows from private data"
    raise ArgumentError(f"precision={precision!r}: must be 'bf16' or None{scaled if precision == 'fp16' else ''}")


def forward(precision: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """Return the context of a forward pass and its loss."""
    return nullcontext() if precision is None else torch.autocast(device.type, precision, cache_enabled=False)


def apart(precision: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which surrounding autocast changes nothing, if a precision was given."""
    return nullcontext() if precision is None else torch.autocast(device.type, enabled=False)


def around(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the present autocast on a device, None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def caveats_of(dtype: torch.dtype | None) -> tuple[str, ...]:
    """Return the sentences that a statement needs for an autocast."""
    return () if dtype is None else (CAVEAT.format(str(dtype).removeprefix("torch.")),)


def words(dtype: torch.dtype | None) -> str:
    """Return an autocast in words."""
    return "off" if dtype is None else f"to {str(dtype).removeprefix('torch.')}"
