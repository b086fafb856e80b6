"""Arrays of this backend: torch tensors on the CPU, which NumPy sees without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpcore.errors import ArgumentTypeError, BackendError


def from_numpy(values: NDArray[Any]) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.from_numpy`."""
    return torch.from_numpy(np.array(values, order="C", copy=True))


def to_numpy(array: torch.Tensor) -> NDArray[Any]:
    """See `dpcore.spec.ops.Backend.to_numpy`."""
    return np.array(view(array), order="C", copy=True)


def beside(array: torch.Tensor) -> AbstractContextManager[None]:
    """See `dpcore.spec.ops.Backend.beside`. All arrays are in one memory."""
    del array
    return nullcontext()


def zeros_like(array: torch.Tensor, dtype: str | None = None) -> torch.Tensor:
    """See `dpcore.spec.ops.Backend.zeros_like`."""
    return torch.zeros(array.shape, dtype=array.dtype if dtype is None else getattr(torch, dtype), device="cpu")


def view(tree: Any) -> Any:
    """Return what NumPy sees of the tensors in a tuple, list or named tuple, or of one; what is no tensor as it is."""
    if isinstance(tree, torch.Tensor):
        if tree.device.type != "cpu":
            raise BackendError(f"a tensor on device {str(tree.device)!r} under backend 'torch': must be on the CPU")
        if tree.dtype == torch.bfloat16:
            raise ArgumentTypeError("a tensor of dtype bfloat16: must be float32 or float64")
        return tree.detach().numpy()
    return [view(each) for each in tree] if isinstance(tree, list | tuple) else tree


def clear(arrays: Sequence[torch.Tensor]) -> None:
    """See `dpcore.spec.ops.Backend.clear`."""
    if arrays:
        torch._foreach_zero_([array.detach() for array in arrays])
