"""Losses of the examples of a batch, each as for a batch of one.

A loss is written for a batch and divides by what is in it. It is called here with one example at a time, by vmap over
the outputs of the whole batch. Where the model itself computes the loss, from labels among its inputs, the loss
functions of torch that it calls give one number for each example instead of their mean: a batch of one would have got
just that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dpcore.torch.sources.places import Layout, UnknownLayout

LOSSES = frozenset({
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.hinge_embedding_loss, F.multi_margin_loss,
    F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.soft_margin_loss,
})  # fmt: skip

_FIRST = ("input", "target")  # the only arguments that hold examples


def example_losses_inside(function: Any, args: Any, kwargs: Any, examples: int) -> torch.Tensor | None:
    """Return the examples' losses (B,) of a loss function that a model calls on all of them; None if it is no such."""
    if function not in LOSSES or kwargs.get("reduction", "mean") == "none" or examples < 1:
        return None
    taken = list(args) + list(kwargs.values())
    names = [*_FIRST[: len(args)], *[""] * (len(args) - 2), *kwargs]
    places = [k for k, value in enumerate(taken) if names[k] in _FIRST and _holds(value, examples)]
    if not places:
        return None
    parts = [taken[k].unflatten(0, (examples, -1)) for k in places]

    def one(*values: torch.Tensor) -> torch.Tensor:
        mine = list(taken)
        for place, value in zip(places, values, strict=True):
            mine[place] = value
        count = len(args)
        loss: torch.Tensor = function(*mine[:count], **dict(zip(kwargs, mine[count:], strict=True)))
        return loss

    return vmap(one, randomness="different")(*parts)


def _holds(value: Any, examples: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] % examples == 0 and value.numel() > 0


def example_losses(
    loss: Callable[[Any, tuple[Any, ...]], torch.Tensor],
    output: Any,
    layouts: Sequence[Layout | None],
    targets: tuple[Any, ...],
    one_by_one: bool = False,
) -> torch.Tensor:
    """Return ``loss(output of example i alone, its targets)`` for each example i: (B,).

    `layouts` says where the examples lie in each tensor of the output; tensors without examples are given as they are.
    """
    leaves, form = tree_flatten(output)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(places) != len(layouts):
        raise UnknownLayout("the model's output has another structure than it had on synthetic examples")
    dims = {place: layout.dim for place, layout in zip(places, layouts, strict=True) if layout is not None}
    if not dims or any(layout is not None and layout.rows != 1 for layout in layouts):
        raise UnknownLayout("the model's output has no dimension of examples")
    examples = leaves[next(iter(dims))].shape[next(iter(dims.values()))]

    def one(tensors: Sequence[torch.Tensor], its_targets: tuple[Any, ...]) -> torch.Tensor:
        mine = list(leaves)
        for (place, dim), tensor in zip(dims.items(), tensors, strict=True):
            mine[place] = tensor.unsqueeze(dim)
        return loss(tree_unflatten(mine, form), tree_map(lambda t: t.unsqueeze(0), its_targets))

    taken = [leaves[place].movedim(dim, 0) for place, dim in dims.items()]
    if one_by_one:
        rows = [
            one([t[i] for t in taken], tree_map(lambda t: t[i], targets))  # noqa: B023
            for i in range(examples)
        ]
        return torch.stack(rows) if rows else taken[0].new_zeros(0)
    return vmap(one, randomness="different")(taken, targets)
