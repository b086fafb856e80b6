"""Where batches come from: any map-style dataset, read by index and moved to the model's device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.randomness import TRIAL, seeded


class Data:
    """Batches by indices.

    Parameters
    ----------
    data : Dataset, or tuple of torch.Tensor or numpy.ndarray
        A map-style dataset (``len`` and ``[i]``), a TensorDataset, or arrays ``(inputs, *targets)`` of equal length.
        Tensors and arrays are indexed directly, other datasets (subclasses of TensorDataset too) example by example.
    device : torch.device
        Where the batches go.
    collate_fn : callable, optional
        Joins a list of a dataset's examples, each into one row; torch's default_collate if not given.
    num_workers : int
        Threads that read examples of a dataset; 0 reads them in this thread.

    Raises
    ------
    ArgumentTypeError
        For a DataLoader (it draws its own batches, which the accounting does not cover) or an iterable dataset.
    ArgumentError
        If there are no examples, or tensors come with a collate_fn.

    Notes
    -----
    Nothing that an error says of a drawn batch (its size, shapes or values) may be published: sentences leave it out,
    and it stays in ``__cause__``.
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
        sized = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if isinstance(data, (IterableDataset, Mapping)) or not sized:
            raise ArgumentTypeError(
                f"data={type(data).__name__}: must be a map-style dataset (with len and indexing) or a tuple of tensors"
            )
        self.device = device
        tensors = _tensors(data)
        if collate_fn is not None and tensors is not None:
            if not isinstance(data, Dataset):
                raise ArgumentError(
                    "collate_fn with tensors as data: rows of tensors need no joining; pass a dataset, for example "
                    "torch.utils.data.TensorDataset(*data)"
                )
            tensors = None
        self.tensors = tensors
        self.dataset = data
        self.length = self.tensors[0].shape[0] if self.tensors is not None else _length(data)
        if self.length == 0:
            raise ArgumentError("data with 0 examples: must have at least one")
        self._collate = collate_fn or default_collate
        workers = validate.integer(minimum=0, num_workers=num_workers)
        self._pool = ThreadPoolExecutor(workers, "dpcore-data") if workers and self.tensors is None else None
        self._one: Tree | None = None

    def batch(self, indices: np.ndarray[Any, np.dtype[np.int64]], seed: bytes) -> Tree:
        """Return the examples at `indices`, in that order, on the device; with none, tensors of 0 rows.

        Parameters
        ----------
        indices : (m,) int64
        seed : bytes
            Of what reading and joining the examples draws by torch; secret (see `dpcore.torch.randomness`).

        Raises
        ------
        ArgumentError
            If the examples cannot be joined, or not into one row each, or their rows have other shapes than example 0
            alone: padding to the longest of a batch lets one example change the inputs of all others.
        """
        if self.tensors is not None:
            index = torch.from_numpy(np.array(indices, dtype=np.int64))
            return tuple(tensor[index.to(tensor.device)].to(self.device) for tensor in self.tensors)
        one = self.template()
        if len(indices) == 0:
            return batches.tree_map(lambda tensor: tensor[:0].clone(), one)
        result = self._read([int(i) for i in indices], seed)
        if [t.shape[1:] for t in batches.leaves(result)] != [t.shape[1:] for t in batches.leaves(one)]:
            raise ArgumentError(
                "collate_fn gave a step's examples other shapes than example 0 has alone: pad every example to one "
                "fixed length, since padding to the longest of a batch lets one example change all others"
            )
        return result

    def template(self) -> Tree:
        """Return a batch of 1 row on the device, for its shapes and dtypes; its values are zeros."""
        if self._one is None:
            one = tuple(t[:1].to(self.device) for t in self.tensors) if self.tensors else self._read([0], TRIAL)
            self._one = batches.tree_map(torch.zeros_like, one)
        return self._one

    def _read(self, places: list[int], seed: bytes) -> Tree:
        read = self._pool.map if self._pool else map
        with seeded(self.device, seed):
            try:
                examples = list(read(self.dataset.__getitem__, places))
            except Exception as cause:
                raise ArgumentError(
                    f"data={type(self.dataset).__name__}: failed to read a step's examples; must give one for every "
                    "index below its len() as it was at first (the reason is this exception's __cause__, not quoted "
                    "because it may tell which examples were drawn)"
                ) from cause
            try:
                joined = self._collate(examples)
            except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as cause:
                raise ArgumentError(
                    "collate_fn failed to join a step's examples: each must have the same shapes, dtypes and keys (the "
                    "reason is this exception's __cause__, not quoted because it may show private values)"
                ) from cause
        result = batches.tree_map(lambda tensor: tensor.to(self.device), joined)
        if batches.size(result) != len(places):
            raise ArgumentError("collate_fn made another number of rows than of examples: it must keep each as one row")
        return result


def _length(data: Any) -> int:
    try:
        return len(data)
    except (TypeError, ValueError) as cause:  # no integer, or a negative one
        raise ArgumentTypeError(
            f"data={type(data).__name__}: its len() must be a number of examples ({cause})"
        ) from None


def _tensors(data: Any) -> tuple[torch.Tensor, ...] | None:
    """The data as tensors, if it is tensors or arrays."""
    if type(data) is TensorDataset:  # a subclass may have a __getitem__ of its own
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
