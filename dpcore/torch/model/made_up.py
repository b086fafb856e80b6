"""Made-up batches in the form of the user's, on which model and loss are tried out."""

from __future__ import annotations

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
