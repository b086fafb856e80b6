"""The form of a batch: the parts for the model and the loss, and the number of examples.

A batch is a tensor (the model's input), a mapping of tensors (the model's keyword arguments), or a sequence
``(inputs, *targets)`` whose first item is either of those, or a sequence of positional arguments, and whose
others go to the loss after the model's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dpcore.errors import ArgumentError, ArgumentTypeError

Tree = Any
"""A tensor, or a sequence or mapping of trees."""


def tree_map(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """Return the tree with `function` applied to each tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, Sequence) and not isinstance(tree, (str, bytes)):
        return tuple(tree_map(function, value) for value in tree)
    raise ArgumentTypeError(
        f"batch={type(tree).__name__!r}: a batch holds tensors, or sequences and mappings of tensors, "
        "with the examples along the first dimension"
    )


def leaves(tree: Tree) -> Iterator[torch.Tensor]:
    """Yield the tensors of the tree in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (Mapping, Sequence)) and not isinstance(tree, (str, bytes)):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(value)


def normalize(batch: Tree) -> tuple[Tree, tuple[Tree, ...]]:
    """Split a batch into (inputs, targets)."""
    batch = tree_map(lambda tensor: tensor, batch)
    if isinstance(batch, tuple):
        if not batch:
            raise ArgumentError("batch=(): a batch is (inputs, *targets)")
        return batch[0], batch[1:]
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


def call(function: Callable[..., Any], inputs: Tree) -> Any:
    """Call the model: a tensor as its one argument, a sequence as positional, a mapping as keyword arguments."""
    if isinstance(inputs, Mapping):
        return function(**inputs)
    if isinstance(inputs, tuple):
        return function(*inputs)
    return function(inputs)


def synthetic(batch: Tree, examples: int, seed: int = 0) -> Tree:
    """Return a batch of `examples` rows of the shapes and dtypes of `batch`, on its devices, with none of its values.

    Floating entries are standard normal, integers 0 or 1 (valid indices of any embedding or class label).
    """
    # Not the stream: these values only try the model out, on copies, and reach no release.
    generator = torch.Generator().manual_seed(seed)  # noqa: TID251

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        shape = (examples, *tensor.shape[1:])
        if tensor.is_floating_point():
            values = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
        else:
            values = torch.randint(0, 2, shape, generator=generator, device="cpu")
        return values.to(dtype=tensor.dtype, device=tensor.device)

    return tree_map(fresh, batch)
