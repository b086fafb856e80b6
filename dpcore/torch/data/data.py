"""The source of batches: any map-style dataset, read by index and moved to the model's device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.randomness import GENERATORS, TRIAL, seeded
from dpcore.torch.reachable import walk

_SEARCHED = 1000
"""Items of each container of a data set that are searched for generators."""


class Data:
    """Batches by indices, of a dataset read example by example, or of tensors and arrays, which are indexed directly.

    Subclasses of TensorDataset are read example by example too. A DataLoader is refused: it draws its own batches,
    which the accounting does not cover. `collate_fn` joins a list of a dataset's examples, each into one row (torch's
    default_collate if not given); `num_workers` threads read them, 0 is this thread.

    Nothing that an error says of a drawn batch (its size, shapes or values) may be published: sentences leave it out,
    and it stays in ``__cause__``.
    """

    def __init__(
        self, data: Any, device: torch.device, collate_fn: Callable[[list[Any]], Any] | None, num_workers: int
    ) -> None:
        if isinstance(data, DataLoader):
            told = "dpcore draws the batches itself, so that the sampling is the one that is accounted"
            raise ArgumentTypeError(f"data=DataLoader: pass its dataset (loader.dataset); {told}")
        self.device = device
        tree = _arrays(data)
        sized = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if tree is None and (isinstance(data, IterableDataset) or not sized):
            told = "must be a map-style dataset (with len and indexing) or a tuple of tensors"
            raise ArgumentTypeError(f"data={type(data).__name__}: {told}")
        if collate_fn is not None and tree is not None:
            if not isinstance(data, Dataset):
                raise ArgumentError(
                    "collate_fn with tensors as data: rows of tensors need no joining; pass a dataset, for example "
                    "torch.utils.data.TensorDataset(*data)"
                )
            tree = None
        self._tree = tree
        self.tensors = None if tree is None else tuple(batches.leaves(tree))
        self.dataset = data
        self.length = _length(data) if tree is None else batches.size(tree)
        self._collate = collate_fn or default_collate
        if self.length == 0:
            raise ArgumentError("data with 0 examples: must have at least one")
        if isinstance(data, list) and tree is None and collate_fn is None:
            _check_example(data[0])
        workers = validate.integer(minimum=0, num_workers=num_workers)
        self._pool = ThreadPoolExecutor(workers, "dpcore-data") if workers and self.tensors is None else None
        self._one: Tree | None = None
        self._generators: list[Any] = []

    def batch(self, indices: np.ndarray[Any, np.dtype[np.int64]], seed: bytes) -> Tree:
        """Return the examples at `indices`, in that order, on the device; with none, tensors of 0 rows.

        What reading and joining them draws follows from the secret `seed`. Refuses rows of other shapes than example 0
        has alone: padding to the longest of a batch lets one example change the inputs of all others.
        """
        if self.tensors is not None:
            index = torch.from_numpy(np.array(indices, dtype=np.int64))
            return batches.tree_map(lambda tensor: tensor[index.to(tensor.device)].to(self.device), self._tree)
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
            if self._tree is not None:
                one = batches.tree_map(lambda tensor: tensor[:1].to(self.device), self._tree)
            else:
                self._generators = self._found()
                one = self._read([0], TRIAL)
                self._generators = self._found()  # some are made by the first reading
            self._one = batches.tree_map(torch.zeros_like, one)
        return self._one

    def _found(self) -> list[Any]:
        """Return the generators that data set, transforms and collate function have of their own."""
        roots = {"data": self.dataset, "collate_fn": self._collate}
        found = walk(roots, most=_SEARCHED)
        return [value for _, value, first in found if isinstance(value, GENERATORS) and not first]

    def _read(self, places: list[int], seed: bytes) -> Tree:
        read = self._pool.map if self._pool else map
        with seeded(self.device, seed, self._generators):
            try:
                examples = list(read(self.dataset.__getitem__, places))
            except Exception as cause:
                raise ArgumentError(
                    f"data={type(self.dataset).__name__}: failed to read a step's examples; must give one for every "
                    "index below its len() as it was at first (the reason is this exception's __cause__, not quoted "
                    "because it may tell which examples were drawn)"
                ) from cause
            if self._collate is default_collate:
                _check_example(examples[0])
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
        told = f"data={type(data).__name__}: its len() must be a number of examples ({cause})"
        raise ArgumentTypeError(told) from None


def _arrays(data: Any) -> Tree | None:
    """Return the data as a tree of tensors in the form of a batch, if they are tensors or arrays."""
    if type(data) is TensorDataset:  # a subclass may have a __getitem__ of its own
        return tuple(data.tensors)
    if isinstance(data, (torch.Tensor, np.ndarray)):
        data = (data,)
    of_arrays = isinstance(data, list) and data and all(isinstance(item, (torch.Tensor, np.ndarray)) for item in data)
    if isinstance(data, Dataset) or not (isinstance(data, (tuple, Mapping)) or of_arrays):
        return None
    tree = _tensors(data, "data")
    counts = [tensor.shape[0] if tensor.dim() else None for tensor in batches.leaves(tree)]
    if not counts or None in counts or len(set(counts)) != 1:
        raise ArgumentError(f"data with first dimensions {counts}: every tensor has one row per example")
    return tree


def _tensors(data: Any, path: str) -> Tree:
    if isinstance(data, Mapping):
        return {key: _tensors(value, f"{path}[{key!r}]") for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        return tuple(_tensors(value, f"{path}[{place}]") for place, value in enumerate(data))
    if not isinstance(data, (torch.Tensor, np.ndarray)):
        raise ArgumentTypeError(
            f"{path}={type(data).__name__}: must be a tensor or an array with a row for each example; examples one by "
            "one go into a list or a dataset"
        )
    with warnings.catch_warnings():
        # Read-only arrays (memory maps, built-in data) are only ever read: rows are copied out by indexing.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        try:
            return torch.as_tensor(data)
        except TypeError as cause:
            raise ArgumentTypeError(f"{path} of dtype {data.dtype}: must be numbers ({cause})") from None


def _check_example(example: Any, inside: bool = False) -> None:
    """Refuse lists of numbers, which default_collate would turn round: one tensor for each place in the list."""
    parts = list(example.values()) if isinstance(example, Mapping) else example
    if not isinstance(parts, (list, tuple)):
        return
    numbers = all(isinstance(part, (bool, int, float)) for part in parts)
    if parts and numbers and (inside or isinstance(example, list)):
        raise ArgumentTypeError(
            "data with lists of numbers in its examples: must be tensors or arrays, as by torch.tensor(...), or give a "
            "collate_fn that makes them"
        )
    for part in parts:
        _check_example(part, inside=True)
