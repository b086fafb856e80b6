"""Finds held-out data that are also trained on, as far as objects can tell: copies cannot be seen."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Subset

from dpcore.errors import ArgumentError
from dpcore.torch.data import batches
from dpcore.torch.data.data import Data, arrays


def check_apart(trained: Data, held_out: Any) -> None:
    """Refuse the run's own data, rows of the same memory, and common indices of two subsets of one data set."""
    tree = arrays(held_out)
    shared = held_out is trained.dataset
    if isinstance(held_out, Subset) and isinstance(trained.dataset, Subset):
        shared |= held_out.dataset is trained.dataset.dataset and bool({*held_out.indices} & {*trained.dataset.indices})
    elif isinstance(held_out, Subset):
        shared |= held_out.dataset is trained.dataset
    elif isinstance(trained.dataset, Subset):
        shared |= trained.dataset.dataset is held_out
    if tree is not None and trained.tensors is not None:
        shared |= any(_overlap(a, b) for a in batches.leaves(tree) for b in trained.tensors)
    if shared:
        raise ArgumentError(
            "data: must not be trained on, in whole or in part, since metrics of training data are private; hold "
            "examples out before make_private"
        )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory: exact for rows of one array, at least the same view for others."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    (first, end), (other, other_end) = _span(a), _span(b)
    return first < other_end and other < end if a.is_contiguous() and b.is_contiguous() else first == other


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
