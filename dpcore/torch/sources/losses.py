"""Losses of the examples of a batch, each as for a batch of one.

A loss is written for a batch and divides by what is in it. It is called here with one example at a time, by vmap over
the outputs of the whole batch. Where the model itself computes the loss, from labels among its inputs, the loss
functions of torch that it calls give one number for each example instead of their mean: a batch of one would have got
just that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dpcore.torch.sources.places import Layout, Shapes, UnknownLayout, layouts, shapes_for, shapes_of_one, tensors

LOSSES = frozenset({
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.hinge_embedding_loss, F.multi_margin_loss,
    F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.soft_margin_loss,
})  # fmt: skip


def example_losses_inside(
    function: Any, args: Any, kwargs: Any, examples: int, layouts: Sequence[Layout | None]
) -> torch.Tensor | None:
    """Return the examples' losses (B,) of a loss function that a model calls on all of them.

    `layouts` says where the examples lie in each tensor of the arguments. None where the function gives what each
    example needs without this: nothing that holds examples, or no reduction.
    """
    given = signature(function).bind(*args, **kwargs).arguments
    if given.get("reduction", "mean") == "none" or given.get("reduce") is False:
        return None
    known = dict(zip(map(id, tensors((args, kwargs))), layouts, strict=True))
    held = {name: value for name, value in given.items() if known.get(id(value)) is not None}
    if not held:
        return None
    if any(known[id(value)] != (0, value.shape[0] // examples) for value in held.values()):
        raise UnknownLayout("a loss function in the model whose examples do not lie along the first dimension")
    parts = [value.unflatten(0, (examples, -1)) for value in held.values()]

    def one(*values: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = function(**given | dict(zip(held, values, strict=True)))
        return loss

    try:
        return vmap(one, randomness="error")(*parts)
    except RuntimeError:  # class weights and label smoothing together have no batched form
        return torch.stack([one(*(part[i] for part in parts)) for i in range(examples)])


class Outputs:
    """Where the examples lie in what a model returns, learned from what it returned for `FEW` examples and for `MORE`.

    Raises
    ------
    UnknownLayout
        If they are not found.
    """

    def __init__(self, few: Any, more: Any) -> None:
        (small, _), (leaves, self._form) = (tree_flatten(_opened(output)[0]) for output in (few, more))
        self._places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        shapes = _shapes(leaves)
        self._layouts = layouts(_shapes(small), shapes)
        self._one = shapes_of_one(self._layouts, shapes)
        if not any(self._layouts):
            raise UnknownLayout("the model's output has no dimension of examples")

    def split(self, output: Any, examples: int) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
        """Return the tensors that hold examples, with these first, and what makes one example's output of its parts."""
        parts, closed = _opened(output)
        leaves, form = tree_flatten(parts)
        if form != self._form or _shapes(leaves) != shapes_for(self._layouts, self._one, examples):
            raise UnknownLayout("the model's output has another structure than it had on synthetic examples")
        held = {place: layout for place, layout in zip(self._places, self._layouts, strict=True) if layout is not None}
        for place in self._places:
            if place not in held and leaves[place].requires_grad:
                leaves[place] = _NoExamples.apply(leaves[place])  # type: ignore[no-untyped-call]
        views = [leaves[place].movedim(d, 0).unflatten(0, (examples, rows)) for place, (d, rows) in held.items()]

        def alone(tensors: Sequence[torch.Tensor]) -> Any:
            mine = list(leaves)
            for (place, layout), tensor in zip(held.items(), tensors, strict=True):
                mine[place] = tensor.movedim(0, layout.dim)
            return closed(tree_unflatten(mine, form))

        return views, alone


def _shapes(leaves: Sequence[Any]) -> Shapes:
    return tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))


class _NoExamples(torch.autograd.Function):
    """The identity on an output that holds all examples at once, or none: a loss must not depend on it."""

    @staticmethod
    def forward(_ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(_ctx: Any, *_gradients: torch.Tensor) -> Any:
        raise UnknownLayout("the loss takes an output of the model that has no dimension of examples")


def _opened(output: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a tree of an output's parts, and what makes such an output of other parts.

    torch does not look into a dataclass of the user's own.
    """
    if not is_dataclass(output) or isinstance(output, (dict, tuple)):
        return output, lambda parts: parts

    def closed(parts: Any) -> Any:
        again = copy(output)
        for name, value in parts.items():
            object.__setattr__(again, name, value)
        return again

    return {field.name: getattr(output, field.name) for field in fields(output)}, closed


def example_losses(
    loss: Callable[[Any, tuple[Any, ...]], torch.Tensor],
    output: Any,
    outputs: Outputs,
    targets: tuple[Any, ...],
    examples: int,
    one_by_one: bool = False,
) -> torch.Tensor:
    """Return ``loss(output of example i alone, its targets)`` for each example i: (B,)."""
    views, alone = outputs.split(output, examples)

    def one(tensors: Sequence[torch.Tensor], its_targets: tuple[Any, ...]) -> torch.Tensor:
        return loss(alone(tensors), tree_map(lambda t: t.unsqueeze(0), its_targets)).reshape(())

    if one_by_one:
        return torch.stack([one([t[i] for t in views], tree_map(lambda t: t[i], targets)) for i in range(examples)])  # noqa: B023
    return vmap(one, randomness="different")(views, targets)
