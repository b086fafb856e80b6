"""The source of batches: any map-style dataset, read by index and moved to the model's device."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.sampling.draw import Indices
from dpcore.spec import validate
from dpcore.spec.silence import silence
from dpcore.torch.data import batches
from dpcore.torch.data.ahead import Ahead
from dpcore.torch.data.batches import Tree
from dpcore.torch.model.state_probe import walk
from dpcore.torch.randomness import GENERATORS, TRIAL, seeded


class Data:
    """Batches by indices, of a dataset read example by example, or of tensors and arrays, which are indexed directly.

    Subclasses of TensorDataset are read example by example too. A DataLoader is refused: it draws its own batches,
    which the accounting does not cover. `collate_fn` joins a list of a dataset's examples, each into one row
    (`dpcore.torch.data.data.join` if not given).

    A dataset may be read `views` times for each index: its rows are then the views of the first example, those of the
    second, and so on. Up to `workers` batches are read ahead, each in a process of its own.

    An error's facts on a drawn batch (its size, shapes or values) must not be published: sentences leave them out, and
    name the kind of error and the line of code that raised it.
    """

    def __init__(
        self,
        data: Any,
        device: torch.device,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        views: int = 1,
    ) -> None:
        if isinstance(data, DataLoader):
            reason = "dpcore draws the batches itself, so that the accounting is right for the sampling"
            raise ArgumentTypeError(f"data=DataLoader: pass its dataset (loader.dataset); {reason}")
        self.device = device
        check_no_table(data, "data")
        tree = arrays(data)
        sized = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if tree is None and (isinstance(data, IterableDataset) or not sized):
            remedy = "must be a map-style dataset (with len and indexing) or a tuple of tensors"
            if hasattr(data, "__iter__"):
                remedy += (
                    "; a stream gives its examples in an order that others know, but the accounting needs batches "
                    "drawn from all of them: write it to disk, or into a list, once"
                )
            raise ArgumentTypeError(f"data={type(data).__name__}: {remedy}")
        if collate_fn is not None and tree is not None:
            if not isinstance(data, Dataset):
                raise ArgumentError(
                    "collate_fn with tensors as data: rows of tensors need no joining; pass a dataset, for example "
                    "torch.utils.data.TensorDataset(*data)"
                )
            tree = None
        self.views = validate.integer(minimum=1, augmentations=views)
        self.workers = validate.integer(minimum=0, num_workers=workers)
        if tree is not None and self.views > 1:
            raise ArgumentError(
                f"augmentations={views} with tensors as data: a row of a tensor is the same at each reading; pass a "
                "dataset whose __getitem__ draws"
            )
        self.tree = tree
        self.tensors = None if tree is None else tuple(batches.leaves(tree))
        self.dataset = data
        self.length = _length(data) if tree is None else batches.size(tree)
        if self.length == 0:
            raise ArgumentError("data with 0 examples: must have at least one")
        if isinstance(data, list) and tree is None and collate_fn is None:
            check_example(data[0])
            check_no_columns(data)
        self._reader = Reader(data, collate_fn, device)
        self._ahead = None if tree is not None or not self.workers else Ahead(self._reader, self.workers)
        self._one: Tree | None = None

    def batch(self, indices: Indices, seed: bytes) -> Tree:
        """Return the examples at `indices`, in that order, on the device; with none, tensors of 0 rows.

        The draws of reading and joining follow from the secret `seed`. Refuses rows of other shapes than example 0 has
        alone: padding to the longest of a batch lets one example change the inputs of all others.
        """
        if self.tree is not None:
            index = torch.from_numpy(np.array(indices, dtype=np.int64))
            return batches.tree_map(lambda tensor: tensor[index.to(tensor.device)].to(self.device), self.tree)
        one = self.template()
        if len(indices) == 0:
            return batches.tree_map(lambda tensor: tensor[:0].clone(), one)
        places = self.places(indices)
        tensors = None if self._ahead is None else self._ahead.take(places, seed)
        if tensors is None:
            tensors = batches.named(self._reader.read(places, seed))
        batches.check_form(tensors, one)
        return batches.named_map(lambda name, _: tensors[name].to(self.device), one)

    def read_ahead(self, indices: Indices, seed: bytes) -> None:
        """Begin to read a batch for a later `batch`, in another process."""
        if self._ahead is not None and len(indices):
            self.template()  # the first reading is done before the process begins
            self._ahead.ask(self.places(indices), seed)

    def places(self, indices: Indices) -> list[int]:
        """Return the places in the data that a draw reads, each once for every view."""
        return [int(index) for index in indices for _ in range(self.views)]

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """Joins single examples."""
        return self._reader.collate

    @property
    def generators(self) -> list[Any]:
        """The generators that data set and collate function have of their own, as far as they were found."""
        return self._reader.generators

    def spread(self, count: int) -> Indices:
        """Return up to `count` places, evenly spaced: a look at the data."""
        return np.unique(np.linspace(0, self.length - 1, min(count, self.length)).astype(np.int64))

    def template(self) -> Tree:
        """Return a batch of 1 row on the device, for its shapes and dtypes; its values are zeros."""
        if self._one is None:
            if self.tree is not None:
                one = batches.tree_map(lambda tensor: tensor[:1], self.tree)
            else:
                self._reader.find_generators()
                one = self._reader.read([0], TRIAL)
                self._reader.find_generators()  # some are made by the first reading
            self._one = batches.tree_map(lambda tensor: torch.zeros_like(tensor, device=self.device), one)
        return self._one

    def example(self, given: Tree | None) -> Tree:
        """Return the batch for trials of the model: the caller's example batch, or the synthetic template."""
        one = self.template()
        if given is None:
            return one
        made = batches.named_map(lambda _, tensor: tensor.detach().to(self.device), given, "example_batch")
        wanted, given_form = (batches.form(batches.named(batch)) for batch in (one, made))
        for name in {**wanted, **given_form}:
            if wanted.get(name) != given_form.get(name):
                has, must = (" ".join(map(str, of.get(name, ("nothing",)))) for of in (given_form, wanted))
                subject = f"example_batch{name.removeprefix('batch')} with {has} for an example"
                raise ArgumentError(f"{subject}: must have the form of the data's batches, {must}")
        count, inputs = batches.size(made), batches.normalize(made)[0]
        before = list(batches.leaves(batches.tree_map(lambda tensor: tensor.roll(1, 0), inputs)))
        pairs = list(zip(batches.leaves(inputs), before, strict=True))
        if count < 2 or any(all(torch.equal(a[i], b[i]) for a, b in pairs) for i in range(count)):
            raise ArgumentError(
                "example_batch: must have two examples or more, and no two neighbors with the same inputs (the last "
                "and the first are neighbors): by one in the place of another it shows whether the model mixes them"
            )
        return batches.Public(made)


def _length(data: Any) -> int:
    try:
        return len(data)
    except (TypeError, ValueError) as cause:  # no integer, or a negative one
        problem = f"data={type(data).__name__}: its len() must be a number of examples ({cause})"
        raise ArgumentTypeError(problem) from None


def arrays(data: Any) -> Tree | None:
    """Return the data as a tree of tensors in the form of a batch, if they are tensors or arrays."""
    if type(data) is TensorDataset:  # a subclass may have a __getitem__ of its own
        return tuple(data.tensors)
    if isinstance(data, (torch.Tensor, np.ndarray)):
        data = (data,)
    if isinstance(data, Dataset) or not isinstance(data, (tuple, Mapping)):
        return None
    tree = _tensors(data, "data")
    counts = list(dict.fromkeys(tensor.shape[0] if tensor.dim() else None for tensor in batches.leaves(tree)))
    if len(counts) != 1 or None in counts:
        raise ArgumentError(f"data with first dimensions {counts[:5]}: every tensor must have one row for each example")
    return tree


def check_no_columns(data: list[Any]) -> None:
    """Refuse a list that may be meant as columns: of tensors, each with as many rows, and as many as the list or more.

    A list is a list of examples, whose number would be another one.
    """
    if all(isinstance(item, (torch.Tensor, np.ndarray)) and item.ndim for item in data):
        rows = {item.shape[0] for item in data}
        if len(rows) == 1 and len(data) <= rows.pop():
            raise ArgumentError(
                f"data=a list of {len(data)} tensors: must be a tuple, (inputs, *targets), if these are columns, or "
                "one tensor, torch.stack(data), if they are examples"
            )


def check_no_table(data: Any, path: str) -> None:
    """Refuse a table of pandas, also in a tuple or mapping: it is indexed by column, or by label."""
    kind = type(data)
    if kind.__module__.partition(".")[0] == "pandas":
        raise ArgumentTypeError(
            f"{path}={kind.__name__}: a table of pandas is not indexed by row; give its values, "
            'df.to_numpy(dtype="float32"), and those of labels that are classes as series.to_numpy(dtype="int64")'
        )
    if isinstance(data, (tuple, Mapping)):
        for name, value in data.items() if isinstance(data, Mapping) else enumerate(data):
            check_no_table(value, f"{path}[{name!r}]")


def _tensors(data: Any, path: str) -> Tree:
    container = batches.parts(data)
    if container is not None:
        pairs = zip(container.names, container.values, strict=True)
        return container.build([None if value is None else _tensors(value, path + name) for name, value in pairs])
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
        except (TypeError, ValueError) as cause:  # such as objects, and rows in reverse
            raise ArgumentTypeError(
                f"{path} of dtype {data.dtype}: must be numbers, as torch takes them ({cause})"
            ) from None


_SEARCHED = 1000
"""Items of each container of a data set that are searched for generators."""


class Reader:
    """Reads examples of a map-style dataset and joins them by `collate_fn`.

    A batch follows only from the places and the seed, in whichever process it is read. `device` is the one whose
    default generator is seeded, together with the CPU's.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, device: torch.device) -> None:
        self.dataset, self.device = dataset, device
        self.collate = collate_fn or join
        self.generators: list[Any] = []

    def find_generators(self) -> None:
        """Look for the generators that data set, transforms and collate function have of their own."""
        reachable = walk({"data": self.dataset, "collate_fn": self.collate}, most=_SEARCHED)
        self.generators = [value for _, value, first in reachable if isinstance(value, GENERATORS) and not first]

    def read(self, places: Sequence[int], seed: bytes) -> Tree:
        """Return the examples at `places`, in that order, as one batch: one row for each.

        The draws of reading and joining follow from the secret `seed`. Errors reveal nothing about the examples, and no
        warning or log is shown.
        """
        with seeded(self.device, seed, self.generators), silence():
            try:
                examples = read_examples(self.dataset, places)
            except Exception as cause:  # noqa: BLE001 - a user's own data set may raise anything
                raise ArgumentError(
                    f"data={type(self.dataset).__name__}: failed to read a step's examples; must give one for every "
                    f"index below its len() as it was at first ({reason(cause)}; its words are left out, as they may "
                    "reveal which examples were drawn)"
                ) from None
            return joined(self.collate, examples)


def reason(cause: BaseException) -> str:
    """Return an error's type and the line of code that raised it, which reveal no value of an example."""
    place = cause.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f" in {Path(place.tb_frame.f_code.co_filename).name}, line {place.tb_lineno}"
    return f"{type(cause).__name__}{where}"


def read_examples(dataset: Any, places: Sequence[int]) -> list[Any]:
    """Return the examples at `places`, each read by itself.

    Not by ``__getitems__``, which torch's own loader calls: it sees a whole batch, and may mix its examples.
    """
    return list(map(dataset.__getitem__, places))


def joined(collate: Callable[[list[Any]], Any], examples: list[Any]) -> Tree:
    """Return the batch of some examples, one row for each; errors reveal nothing about the examples.

    A caller's `collate` gets one example at a time, and its rows are joined here: no row can be made of two examples,
    whatever `collate` does. One that mixed them would let an example move others' gradients, but each is clipped only
    as its own.
    """
    if collate is join:
        check_example(examples[0])
    try:
        if collate is join:
            return join(examples)
        rows = [collate([example]) for example in examples]
    except Exception as cause:  # noqa: BLE001 - a caller's function may raise anything
        raise ArgumentError(
            "collate_fn failed to join a step's examples: each must have the same shapes, dtypes and keys, so pad "
            f"examples to one fixed length ({reason(cause)}; its words are left out, as they may show private values)"
        ) from None
    tensors = [batches.named(row) for row in rows]
    for row, own in zip(rows, tensors, strict=True):
        if batches.size(row) != 1:
            raise ArgumentError(
                "collate_fn([example]) did not make one row: it gets each example alone, and must keep it as one row"
            )
        batches.check_form(own, rows[0])
    return batches.named_map(lambda name, _: torch.cat([own[name] for own in tensors]), rows[0])


def join(examples: Sequence[Any]) -> Tree:
    """Return the batch of some examples, in the form of each: tensors stacked, numbers made tensors, None kept.

    Torch's default_collate joins values that are no containers. A list of numbers inside an example is one tensor, as
    in the rows of a Hugging Face dataset; default_collate would make a tensor of each place in the list.
    """
    first = examples[0]
    if all(example is None for example in examples):
        return None
    if _is_numbers(first):
        return torch.stack([torch.tensor(example) for example in examples])
    container = batches.parts(first)
    if container is None:
        return default_collate(list(examples))
    columns = []
    for example in examples:
        like = batches.parts(example)
        if like is None or like.names != container.names:
            raise ValueError("examples of different forms")
        columns.append(like.values)
    return container.build([join(column) for column in zip(*columns, strict=True)])


def _is_numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, or of such lists."""
    if not isinstance(value, list) or not value:
        return False
    return all(_is_numbers(part) if isinstance(part, list) else isinstance(part, (bool, int, float)) for part in value)


def check_example(example: Any) -> None:
    """Refuse an example that `join` would not understand, with the name of the field."""
    if _is_numbers(example):
        raise ArgumentTypeError(
            "data with lists of numbers as its examples: must be tensors or arrays, as by torch.tensor(...), or give a "
            "collate_fn that makes them"
        )
