"""Arrays of this backend: torch tensors on the CPU, which NumPy reads without a copy, and 16 bits piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpcore.errors import BackendError


def from_numpy(values: NDArray[Any]) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.from_numpy`."""
    return torch.from_numpy(np.array(values, order="C", copy=True))


def to_numpy(array: torch.Tensor) -> NDArray[Any]:
    """See `dpcore.spec.ops.Backend.to_numpy`."""
    return np.array(view(array.float() if array.dtype == torch.bfloat16 else array), order="C", copy=True)


def beside(array: torch.Tensor) -> AbstractContextManager[None]:
    """See `dpcore.spec.ops.Backend.beside`. All arrays are in one memory."""
    del array
    return nullcontext()


def zeros_like(array: torch.Tensor, dtype: str | None = None) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.zeros_like`."""
    return torch.zeros(array.shape, dtype=array.dtype if dtype is None else getattr(torch, dtype), device="cpu")


def at_least_float32(array: torch.Tensor) -> torch.Tensor:
    """See `dpcore_numpy.arrays.at_least_float32`."""
    return array.detach().float() if array.dtype.itemsize == 2 else array.detach()


class Widened:
    """Represents a tensor of bfloat16, which NumPy lacks: a piece of it is the float32 array of its numbers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def __getitem__(self, place: Any) -> NDArray[Any]:
        piece: NDArray[Any] = self.tensor[place].float().numpy()
        return piece


def view(tree: Any) -> Any:
    """Return the tensors of a tuple, list or named tuple, or one tensor, as NumPy arrays; other values as they are."""
    if isinstance(tree, torch.Tensor):
        if tree.device.type != "cpu":
            raise BackendError(f"a tensor on device {str(tree.device)!r} under backend 'torch': must be on the CPU")
        return Widened(tree.detach()) if tree.dtype == torch.bfloat16 else tree.detach().numpy()
    return [view(each) for each in tree] if isinstance(tree, list | tuple) else tree


def clear(arrays: Sequence[torch.Tensor]) -> None:
    """See `dpcore.spec.ops.Backend.clear`."""
    if arrays:
        torch._foreach_zero_([array.detach() for array in arrays])
