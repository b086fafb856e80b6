"""The form of a batch: the parts for the model and the loss, and the number of examples.

A batch is a tensor (the model's input), a mapping of tensors (the model's keyword arguments), a dataclass (the model's
one argument), or a sequence ``(inputs, *targets)`` whose first item is one of those, or a sequence of positional
arguments, and whose others go to the loss after the model's output.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from dpcore.errors import ArgumentError, ArgumentTypeError

Tree = Any
"""A tensor, None, or a container of trees (see `parts`)."""


class Parts(NamedTuple):
    """The content of a container: the access to each item, the items, and a function that rebuilds it from items."""

    names: list[str]
    values: list[Any]
    build: Callable[[list[Any]], Any]


def parts(tree: Any) -> Parts | None:
    """Return the parts of a container, None for everything else.

    A container is a kind in torch's pytree (lists, tuples, NamedTuples, dicts, the outputs of Hugging Face models, and
    registered ones), any other mapping or sequence, which is built again as a dict or a tuple, and a dataclass.
    """
    if tree is None or isinstance(tree, (torch.Tensor, str, bytes)):
        return None
    known = _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(tree))
    # Not by tree_flatten, which leaves a cycle of closures behind: each batch would live until the collector runs.
    values, context = ([], None) if known is None else known.flatten_fn(tree)
    if isinstance(tree, Mapping):
        keys = list(tree)
        names = [f"[{key!r}]" for key in keys]
        if known is not None and len(keys) == len(values):
            return Parts(names, values, lambda items: known.unflatten_fn(items, context))
        return Parts(names, list(tree.values()), lambda items: dict(zip(keys, items, strict=True)))
    if known is not None:
        names = [f"[{place}]" for place in range(len(values))]
        return Parts(names, values, lambda items: known.unflatten_fn(items, context))
    if isinstance(tree, Sequence):
        return Parts([f"[{place}]" for place in range(len(tree))], list(tree), tuple)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [field.name for field in dataclasses.fields(tree)]
        values = [getattr(tree, name, None) for name in fields]
        return Parts([f".{name}" for name in fields], values, lambda items: _replaced(tree, fields, items))
    return None


def _replaced(instance: Any, fields: list[str], values: list[Any]) -> Any:
    """Return a copy of a dataclass with other values, without a call of its constructor."""
    result = copy.copy(instance)
    for name, value in zip(fields, values, strict=True):
        object.__setattr__(result, name, value)  # it may be frozen
    return result


def named_map(function: Callable[[str, torch.Tensor], Any], tree: Tree, path: str = "batch") -> Tree:
    """Return the tree with ``function(name, tensor)`` in the place of each tensor; None stays."""
    if isinstance(tree, torch.Tensor):
        return function(path, tree)
    if tree is None:
        return None
    container = parts(tree)
    if container is None:
        raise ArgumentTypeError(
            f"{path}={type(tree).__name__!r}: a batch has tensors, None, or sequences, mappings and dataclasses of "
            "them, with the examples along the first dimension of each tensor"
        )
    pairs = zip(container.names, container.values, strict=True)
    return container.build([named_map(function, value, path + name) for name, value in pairs])


def tree_map(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """Return the tree with `function` applied to each tensor; None stays, all else is refused."""
    return named_map(lambda _, tensor: function(tensor), tree)


def leaves(tree: Tree) -> Iterator[torch.Tensor]:
    """Yield the tensors of the tree in order; other values, as in a model's output, are skipped."""
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        container = parts(tree)
        for value in () if container is None else container.values:
            yield from leaves(value)


def normalize(batch: Tree) -> tuple[Tree, tuple[Tree, ...]]:
    """Split a batch into (inputs, targets)."""
    batch = tree_map(lambda tensor: tensor, batch)
    if isinstance(batch, (tuple, list)):
        if not batch:
            raise ArgumentError("batch=(): a batch is (inputs, *targets)")
        return batch[0], tuple(batch[1:])
    return batch, ()


def size(batch: Tree) -> int:
    """Return the number of examples of a batch; refuse tensors that disagree about it."""
    counts = [tensor.shape[0] if tensor.dim() else None for tensor in leaves(batch)]
    if not counts or None in counts or len(set(counts)) != 1:
        raise ArgumentError(
            "batch whose tensors disagree about the number of examples: every tensor of a batch has the examples along "
            "its first dimension, the same number in each"
        )
    assert counts[0] is not None
    return counts[0]


def filled(batch: Tree, rows: int) -> Tree:
    """Return a batch with `rows` rows, if it has fewer: its last one again and again."""
    missing = rows - size(batch)
    if missing <= 0:
        return batch
    return tree_map(lambda t: torch.cat([t, t[-1:].expand(missing, *t.shape[1:])]), batch)


def named(batch: Tree) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by their names."""
    tensors: dict[str, torch.Tensor] = {}
    named_map(tensors.setdefault, batch)
    return tensors


def content(tensor: torch.Tensor) -> bytes:
    """Return a tensor's entries as bytes, row by row."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def memory(tree: Tree) -> set[tuple[torch.device, int]]:
    """Return the places of the tensors' storages, if they have entries; a view has the place of its base."""
    return {(t.device, t.untyped_storage().data_ptr()) for t in leaves(tree) if t.numel()}


def form(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shape of one example and the dtype of each of a batch's tensors."""
    return {name: (tensor.shape[1:], tensor.dtype) for name, tensor in tensors.items()}


def check_form(tensors: Mapping[str, torch.Tensor], one: Tree) -> None:
    """Refuse a step's examples that have other fields, shapes or dtypes than example 0 alone."""
    if form(tensors) != form(named(one)):
        raise ArgumentError(
            "collate_fn gave a step's examples other fields, shapes or dtypes than example 0 has alone: pad every "
            "example to one fixed length, since padding to the longest of a batch lets one example change all others; "
            'for text of transformers that is DataCollatorWithPadding(tok, padding="max_length", max_length=N)'
        )


def call(function: Callable[..., Any], inputs: Tree) -> Any:
    """Call the model: a sequence as positional, a mapping as keyword arguments, all else as its one argument."""
    if isinstance(inputs, Mapping):
        return function(**inputs)
    if isinstance(inputs, (tuple, list)):
        return function(*inputs)
    return function(inputs)


@dataclasses.dataclass(frozen=True)
class Public:
    """A batch of public values: the examples that the caller gave to try the model on."""

    batch: Tree


def synthetic(batch: Tree, examples: int, *, other: bool = False) -> Tree:
    """Return a made-up batch of `examples` rows in the form of `batch`, on its devices, with none of its values.

    Floating entries are standard normal, integers 0 or 1 (valid indices of any embedding or class label). Masks, which
    are integers with "mask" in their name and rows of booleans, mask nothing. The `other` batch is unlike this one in
    every entry, except that a mask differs only in the last one: a row that is masked as a whole has no attention to
    compute. The rows of a `Public` batch are taken in turn; the `other` one begins with the second.
    """
    if isinstance(batch, Public):
        rows = (torch.arange(examples) + other) % size(batch.batch)
        return tree_map(lambda tensor: tensor[rows.to(tensor.device)], batch.batch)
    # Not the stream: these values only try the model out, on copies, and reach no release.
    generator = torch.Generator().manual_seed(0)  # noqa: TID251

    def fresh(name: str, tensor: torch.Tensor) -> torch.Tensor:
        shape, kept = (examples, *tensor.shape[1:]), _kept(name, tensor)
        if tensor.is_floating_point():
            values = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=generator) + other
        elif kept is None:
            values = torch.randint(0, 2, shape, generator=generator, device="cpu") ^ other
        else:
            values = torch.full(shape, int(kept), device="cpu")
            if other and len(shape) > 1 and shape[-1] > 1:
                values[..., -1] = int(not kept)
        return values.to(dtype=tensor.dtype, device=tensor.device)

    return named_map(fresh, batch)


def _kept(name: str, tensor: torch.Tensor) -> bool | None:
    """Return a mask's value that masks nothing; None if it is no mask.

    It is True, as in an attention mask; but in torch's padding masks, True means to leave out.
    """
    named, rows = "mask" in name.lower(), tensor.dim() > 1 and tensor.shape[-1] > 1
    if tensor.is_floating_point() or not (named or (tensor.dtype == torch.bool and rows)):
        return None
    return not (named and "pad" in name.lower())


def trial_batch(example: Tree, examples: int, other: bool = False, label: int = 0) -> Tree:
    """Return a made-up batch in the form of `example`, or another one that differs in every value of the inputs.

    All targets are `label`: 0 and 1 are class labels, probabilities and numbers alike. Of a `Public` batch the
    examples are taken as they are, in turn, or beginning with the next one.
    """
    if isinstance(example, Public):
        return synthetic(example, examples, other=other)
    inputs, targets = normalize(example)
    made = synthetic(inputs, examples, other=other)
    filled = tree_map(lambda t: t.new_full((examples, *t.shape[1:]), label), targets)
    return (made, *filled) if isinstance(example, (tuple, list)) else made
