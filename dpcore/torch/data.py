"""Where batches come from: any map-style dataset, read by index and moved to the model's device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from dpcore import validate
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.torch import batches
from dpcore.torch.batches import Tree


class Data:
    """Batches by indices.

    Parameters
    ----------
    data : Dataset, or tuple of torch.Tensor or numpy.ndarray
        A map-style dataset (``len`` and ``[i]``), a TensorDataset, or arrays ``(inputs, *targets)`` of equal length.
        Tensors and arrays are indexed directly, other datasets example by example.
    device : torch.device
        Where the batches go.
    collate_fn : callable, optional
        Joins a list of examples; torch's default_collate if not given.
    num_workers : int
        Threads that read examples of a dataset; 0 reads them in this thread.

    Raises
    ------
    ArgumentTypeError
        For a DataLoader (it draws its own batches, which the accounting does not cover) or an iterable dataset.
    """

    def __init__(
        self,
        data: Any,
        device: torch.device,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> None:
        if isinstance(data, DataLoader):
            raise ArgumentTypeError(
                "data=DataLoader: pass its dataset (loader.dataset); dpcore draws the batches itself, so that the "
                "sampling is the one that is accounted"
            )
        if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise ArgumentTypeError(
                f"data={type(data).__name__}: must be a map-style dataset (with len and indexing) or a tuple of tensors"
            )
        self.device = device
        self.tensors = _tensors(data) if collate_fn is None else None
        self.dataset = data
        self.length = self.tensors[0].shape[0] if self.tensors is not None else len(data)
        if self.length == 0:
            raise ArgumentError("data with 0 examples: must have at least one")
        self._collate = collate_fn or default_collate
        workers = validate.integer(minimum=0, num_workers=num_workers)
        self._pool = ThreadPoolExecutor(workers, "dpcore-data") if workers and self.tensors is None else None
        self._empty: Tree | None = None

    def batch(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> Tree:
        """Return the examples at `indices`, in that order, on the device; with none, tensors of 0 rows."""
        if self.tensors is not None:
            index = torch.from_numpy(np.array(indices, dtype=np.int64))
            return tuple(tensor[index.to(tensor.device)].to(self.device) for tensor in self.tensors)
        if len(indices) == 0:
            if self._empty is None:
                # An empty draw still needs shapes and dtypes; the example read for them is dropped at once.
                self._empty = batches.tree_map(lambda t: t[:0].clone(), self._collate([self.dataset[0]]))
            return self._moved(self._empty)
        places = [int(i) for i in indices]
        read = self._pool.map if self._pool else map
        examples = list(read(self.dataset.__getitem__, places))
        result = self._moved(self._collate(examples))
        if batches.size(result) != len(places):
            raise ArgumentError(
                f"collate_fn made {batches.size(result)} rows of {len(places)} examples: it must keep every example as "
                "one row"
            )
        return result

    def template(self) -> Tree:
        """Return a batch of 1 row on the device, for its shapes and dtypes; its values are zeros."""
        one = self.batch(np.zeros(1, dtype=np.int64))
        return batches.tree_map(torch.zeros_like, one)

    def _moved(self, batch: Any) -> Tree:
        return batches.tree_map(lambda tensor: tensor.to(self.device), batch)


def _tensors(data: Any) -> tuple[torch.Tensor, ...] | None:
    """The data as tensors, if it is tensors or arrays."""
    if isinstance(data, TensorDataset):
        return tuple(data.tensors)
    items: Sequence[Any] = (data,) if isinstance(data, (torch.Tensor, np.ndarray)) else data
    if not isinstance(items, (tuple, list)) or isinstance(data, Dataset):
        return None
    if not items or not all(isinstance(item, (torch.Tensor, np.ndarray)) for item in items):
        return None
    with warnings.catch_warnings():
        # Read-only arrays (memory maps, built-in data) are only ever read: rows are copied out by indexing.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        tensors = tuple(torch.as_tensor(item) for item in items)
    counts = [tensor.shape[0] if tensor.dim() else None for tensor in tensors]
    if None in counts or len(set(counts)) != 1:
        raise ArgumentError(f"data with first dimensions {counts}: every tensor has one row per example")
    return tensors
