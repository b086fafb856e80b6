"""The identity of the example at each place of some data, as far as objects show it: copies are not recognized.

Held-out data must not be trained on, and an example at several places of the training data would count as several
people. Both need one table: the example of each place of the data.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.sampling import Sampler
from dpcore.torch.data import batches
from dpcore.torch.data.data import arrays

Places = NDArray[np.int64]

_OBJECT, _MEMORY = -1, -2  # any other source is the id of a data set
_PLAIN = (str, bytes, int, float, type(None))


def overlapping(first: Any, second: Any) -> bool:
    """Return whether two data sets read the same example somewhere; of a stream, whether they are one object."""
    if first is second or not (hasattr(first, "__len__") and hasattr(second, "__len__")):
        return first is second
    tables = identities(first), identities(second)
    a, b = _pairs(np.concatenate(tables))
    return bool(((a < len(tables[0])) & (b >= len(tables[0]))).any())


def check_once(data: Any, sampler: Sampler) -> None:
    """Refuse an example at several places of the training data, unless they all are one user's."""
    if not isinstance(data, (list, Subset, ConcatDataset)):
        return  # any other data set is taken at its word: an index is an example
    first, second = _pairs(identities(data))
    users = getattr(sampler, "user_of_example", None)
    if users is not None:
        strangers = np.asarray(users)[first] != np.asarray(users)[second]
        first, second = first[strangers], second[strangers]
    if len(first):
        raise ArgumentError(
            f"data: places {first[0]} and {second[0]} are the same example, which would count as two people: leave "
            "repeated places out, or give all places of an example to one user, by "
            "sampling=dpcore.sampling.UserSampler(...)"
        )


def identities(data: Any) -> Places:
    """Return a row for each place, its source and its name there: equal if the same object or memory is read."""
    if isinstance(data, Subset):
        indices = np.asarray(data.indices).reshape(-1)
        if indices.size and indices.dtype.kind not in "iu":
            raise ArgumentTypeError(
                f"data=Subset: its indices must be integers, not {indices.dtype}; of a mask, give np.flatnonzero(mask)"
            )
        inner = identities(data.dataset)
        if indices.size and not -len(inner) <= indices.min() <= indices.max() < len(inner):
            raise ArgumentError(f"data=Subset: its indices must be below {len(inner)}, the length of its data set")
        return inner[indices.astype(np.int64)]
    if isinstance(data, ConcatDataset):
        return np.concatenate([identities(part) for part in data.datasets])
    tree = arrays(data)
    if tree is not None:
        return _of_rows(data, tree)
    if isinstance(data, list):
        names = [(id(data), place) if isinstance(x, _PLAIN) else (_OBJECT, id(x)) for place, x in enumerate(data)]
        return np.array(names, dtype=np.int64).reshape(-1, 2)
    return _numbered(data, len(data))


def _of_rows(data: Any, tree: Any) -> Places:
    """Return the addresses of the rows of the first tensor whose rows do not all have one address."""
    count = batches.size(tree)
    for tensor in batches.leaves(tree):
        if tensor.device.type in ("cpu", "cuda") and tensor.stride(0) and tensor[:1].numel():
            addresses = tensor.data_ptr() + np.arange(count) * tensor.stride(0) * tensor.element_size()
            device = 0 if tensor.device.type == "cpu" else 1 + (tensor.device.index or 0)
            return np.column_stack([np.full(count, _MEMORY - device), addresses]).astype(np.int64)
    return _numbered(data, count)


def _numbered(data: Any, count: int) -> Places:
    return np.column_stack([np.full(count, id(data)), np.arange(count)]).astype(np.int64)


def _pairs(table: Places) -> tuple[Places, Places]:
    """Return pairs of places with the same row, the earlier one first: each place with the next one like it."""
    order = np.lexsort(table.T[::-1])  # stable
    alike = (table[order][1:] == table[order][:-1]).all(axis=1)
    return order[:-1][alike], order[1:][alike]
