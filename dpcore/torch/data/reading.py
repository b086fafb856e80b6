"""Reading of a dataset: the drawn examples, joined to one batch, with all that reading draws set from a seed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.randomness import GENERATORS, seeded
from dpcore.torch.reachable import walk

_SEARCHED = 1000
"""Items of each container of a data set that are searched for generators."""


class Reader:
    """Reads examples of a map-style dataset in `threads` threads (0: in the caller's) and joins them by `collate_fn`.

    What a batch holds follows from the places and the seed alone, in whichever process it is read; with threads, which
    of its draws an example gets is left to their timing. `device` is the one whose default generator is seeded beside
    the CPU's.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, threads: int, device: torch.device
    ) -> None:
        self.dataset, self.device = dataset, device
        self.collate = collate_fn or join
        self._threads = validate.integer(minimum=0, num_workers=threads)
        self._pool: tuple[int, ThreadPoolExecutor] | None = None  # of which process: threads do not survive a fork
        self.generators: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave the threads out, for a process of its own."""
        return {**self.__dict__, "_pool": None}

    def find_generators(self) -> None:
        """Look for the generators that data set, transforms and collate function have of their own."""
        found = walk({"data": self.dataset, "collate_fn": self.collate}, most=_SEARCHED)
        self.generators = [value for _, value, first in found if isinstance(value, GENERATORS) and not first]

    def read(self, places: Sequence[int], seed: bytes) -> Tree:
        """Return the examples at `places`, in that order, as one batch: one row for each.

        What reading and joining draw follows from the secret `seed`. Errors tell nothing of the examples.
        """
        with seeded(self.device, seed, self.generators):
            try:
                examples = self._examples(places)
            except Exception as cause:  # noqa: BLE001 - a user's own data set may raise anything
                raise ArgumentError(
                    f"data={type(self.dataset).__name__}: failed to read a step's examples; must give one for every "
                    f"index below its len() as it was at first ({reason(cause)}; its words are left out, as they may "
                    "tell which examples were drawn)"
                ) from None
            return joined(self.collate, examples)

    def _examples(self, places: Sequence[int]) -> list[Any]:
        if not self._threads:
            return read_examples(self.dataset, places)
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(self._threads, "dpcore-data")
        return list(self._pool[1].map(self.dataset.__getitem__, places))


def reason(cause: BaseException) -> str:
    """Return an error's type and the line of code that raised it: what tells no value of an example."""
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
    """Return the batch of some examples, one row for each; errors tell nothing of the examples.

    A caller's `collate` is given one example at a time, and its rows are put together here: no row can be made of two
    examples, whatever `collate` does. One that mixed them would let an example move others' gradients, each of which is
    clipped as its own only.
    """
    if collate is join:
        check_example(examples[0])
    try:
        if collate is join:
            return join(examples)
        rows = [collate([example]) for example in examples]
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as cause:
        raise ArgumentError(
            "collate_fn failed to join a step's examples: each must have the same shapes, dtypes and keys, so pad "
            f"examples to one fixed length ({reason(cause)}; its words are left out, as they may show private values)"
        ) from None
    tensors = [batches.named(row) for row in rows]
    for row, own in zip(rows, tensors, strict=True):
        if batches.size(row) != 1:
            raise ArgumentError(
                "collate_fn([example]) made another number of rows than one: it is given each example alone, and must "
                "keep it as one row"
            )
        batches.check_form(own, rows[0])
    return batches.named_map(lambda name, _: torch.cat([own[name] for own in tensors]), rows[0])


def join(examples: Sequence[Any]) -> Tree:
    """Return the batch of some examples, in the form of each: tensors stacked, numbers made tensors, None kept.

    Torch's default_collate joins what is no container. A list of numbers inside of an example is one tensor, as in the
    rows of a Hugging Face dataset; default_collate would make a tensor of each place in the list.
    """
    first = examples[0]
    if all(example is None for example in examples):
        return None
    if _is_numbers(first):
        return torch.stack([torch.tensor(example) for example in examples])
    found = batches.parts(first)
    if found is None:
        return default_collate(list(examples))
    columns = []
    for example in examples:
        like = batches.parts(example)
        if like is None or like.names != found.names:
            raise ValueError("examples of different forms")
        columns.append(like.values)
    return found.build([join(column) for column in zip(*columns, strict=True)])


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
    _check_field(example, "data[...]")


def _check_field(value: Any, path: str) -> None:
    if isinstance(value, (str, bytes)):
        raise ArgumentTypeError(
            f"{path}={type(value).__name__!r}: text is no input of a model; leave the field out of the examples, or "
            "make numbers of it, as a tokenizer does"
        )
    found = None if _is_numbers(value) else batches.parts(value)
    for name, item in zip(found.names, found.values, strict=True) if found else ():
        _check_field(item, path + name)
