"""Made-up batches in the form of the user's, on which model and loss are tried out."""

from __future__ import annotations

import torch

from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree


def trial_batch(example: Tree, examples: int, other: bool = False, label: int = 0) -> Tree:
    """Return a made-up batch in the form of `example`, or another one that differs in every value of the inputs.

    All targets are `label`: 0 and 1 are class labels, probabilities and numbers alike. Of a `batches.Public` batch the
    examples are taken as they are, in turn, or beginning with the next one.
    """
    make = batches.another if other else batches.synthetic
    if isinstance(example, batches.Public):
        return make(example, examples)
    inputs, targets = batches.normalize(example)
    made = make(inputs, examples)
    filled = batches.tree_map(lambda t: t.new_full((examples, *t.shape[1:]), label), targets)
    return (made, *filled) if filled else made


def replaced(tree: Tree, source: Tree) -> Tree:
    """Return the tree with its second example taken from `source`."""
    donors = iter(batches.leaves(source))

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        result[1] = next(donors)[1]
        return result

    return batches.tree_map(changed, tree)


def poisoned(tree: Tree) -> Tree:
    """Return a batch full of NaN; integers, which have none, stay as they are."""
    return batches.tree_map(lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else t, tree)
