"""Arrays of this backend: torch tensors, on the GPU or, under Triton's interpreter, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpcore_triton.launch import INTERPRETED, default_device


def from_numpy(values: NDArray[Any]) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.from_numpy`."""
    return torch.from_numpy(np.array(values, order="C", copy=True)).to(default_device())


def to_numpy(array: torch.Tensor) -> NDArray[Any]:
    """See `dpcore.spec.ops.Backend.to_numpy`."""
    host = array.detach().cpu()
    return np.array((host.float() if host.dtype == torch.bfloat16 else host).numpy(), order="C", copy=True)


def beside(array: torch.Tensor) -> AbstractContextManager[None]:
    """See `dpcore.spec.ops.Backend.beside`."""
    return nullcontext() if INTERPRETED else torch.cuda.device(array.device)


def zeros_like(array: torch.Tensor, dtype: str | None = None) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.zeros_like`."""
    chosen = array.dtype if dtype is None else getattr(torch, dtype)
    return torch.zeros(array.shape, dtype=chosen, device=array.device)


def clear(arrays: Sequence[torch.Tensor]) -> None:
    """See `dpcore.spec.ops.Backend.clear`."""
    if arrays:  # a few launches, whatever the number of arrays
        with torch.no_grad():
            torch._foreach_zero_(list(arrays))


@contextmanager
def written_back(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Give contiguous tensors for those that a kernel changes in place; copy the copies among them back."""
    lent = [tensor.detach().contiguous() for tensor in tensors]
    yield lent
    for tensor, stand_in in zip(tensors, lent, strict=True):
        if stand_in.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(stand_in)
