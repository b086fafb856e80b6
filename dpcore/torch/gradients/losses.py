"""Losses of the examples of a batch, each as for a batch of one.

A loss is written for a batch and divides by its size. It is called here with one example at a time, by vmap over the
outputs of the whole batch. If the model itself computes the loss, from labels among its inputs, the loss functions of
torch that it calls give one number for each example instead of their mean, just as for a batch of one.

All of this is a part of the captured graph, whose proof covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from dpcore.errors import ArgumentError
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.gradients.errors import NotCaptured
from dpcore.torch.gradients.replaced import REPLACED

ExampleLoss = Callable[[Any, tuple[Tree, ...]], torch.Tensor]
"""The loss of one example: its output and its targets, each as a batch of one; a scalar."""

LOSSES = frozenset({
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.hinge_embedding_loss, F.multi_margin_loss,
    F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.soft_margin_loss,
})  # fmt: skip


def losses_inside(function: Any, args: Any, kwargs: Any, count: int) -> torch.Tensor | None:
    """Return the examples' losses (B,) of a loss function that a model calls on all of them.

    None if it is no loss function, or already gives each example's loss.
    """
    if function not in LOSSES:
        return None
    given = signature(function).bind(*args, **kwargs).arguments
    if given.get("reduction", "mean") == "none" or given.get("reduce") is False:
        return None
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and value.dim()}
    held = {name: value for name, value in tensors.items() if value.shape[0] and value.shape[0] % count == 0}
    if not held:
        return None
    if torch.is_autocast_enabled(next(iter(held.values())).device.type):
        held = in_float32(held)
    parts = [value.unflatten(0, (count, -1)) for value in held.values()]  # type: ignore[no-untyped-call]

    def one(*values: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = REPLACED.get(function, function)(**given | dict(zip(held, values, strict=True)))
        return loss

    return vmap(one, randomness="error")(*parts)


def example_losses(loss: ExampleLoss, output: Any, targets: tuple[Any, ...], count: int) -> torch.Tensor:
    """Return ``loss(output of example i alone, its targets)`` for each example i: (B,).

    Raises
    ------
    NotCaptured
        If no dimension of the output counts the examples, or several do.
    """
    leaves, own = list(batches.leaves(output)), list(batches.leaves(targets))
    places, dims = [], []
    for place, leaf in enumerate(leaves):
        found = [d for d, size in enumerate(leaf.shape) if size and size % count == 0]
        if len(found) > 1:
            raise NotCaptured("the model's output has one entry for each pair of examples")
        if found:
            places.append(place)
            dims.append(found[0])
    if not places:
        raise NotCaptured("the model's output has no dimension of examples")
    views = [leaves[p].movedim(d, 0).unflatten(0, (count, -1)) for p, d in zip(places, dims, strict=True)]  # type: ignore[no-untyped-call]

    def one(tensors: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> torch.Tensor:
        mine = list(leaves)
        for place, dim, tensor in zip(places, dims, tensors, strict=True):
            mine[place] = tensor.movedim(0, dim)
        its_targets = _with_tensors(targets, (t.unsqueeze(0) for t in labels))
        return loss(_with_tensors(output, iter(mine)), its_targets).reshape(())

    return vmap(one, randomness="different")(views, own)


def in_float32(output: Any) -> Any:
    """Return a tree with its 16-bit tensors in float32, as autocast does for losses, except under vmap."""
    leaves = batches.leaves(output)
    return _with_tensors(output, (t.float() if t.is_floating_point() and t.itemsize == 2 else t for t in leaves))


def _with_tensors(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return a tree with other tensors; the rest of it stays."""
    if isinstance(tree, torch.Tensor):
        return next(tensors)
    found = batches.parts(tree)
    return tree if found is None else found.build([_with_tensors(value, tensors) for value in found.values])


def check_targets(loss: Callable[..., Any], targets: Sequence[Any]) -> None:
    """Refuse a third tensor of the data under the default loss, which would take it for class weights."""
    if loss is F.cross_entropy and len(targets) > 1:
        raise ArgumentError(
            f"data with {len(targets) + 1} parts: the default loss, cross_entropy, takes an output and one target; give "
            "loss= a function of (output, *targets), or put inputs that belong together into one tuple"
        )


def check_scalar(value: Any) -> torch.Tensor:
    """Return the loss of one example as a tensor without dimensions."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ArgumentError(
            f"loss returned {shape} for a batch of one example: it must return one number (reduction='mean' or "
            "'sum'); give the loss as loss= to make_private if it is another than the default cross_entropy"
        )
    return value.reshape(())


def loss_failed(loss: Callable[..., Any], targets: int, why: str) -> str:
    """Return the sentence for a loss that raised on made-up values."""
    name = getattr(loss, "__name__", type(loss).__name__)
    return (
        f"loss={name}{' (the default)' if loss is F.cross_entropy else ''}: failed on the model's output "
        f"and {targets} targets ({why}); give loss= a function of (output, *targets) that fits the data"
    )


class Calls(TorchFunctionMode):
    """Refuses losses that are another function for a batch of one, and assignments that would crash torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: int | None = None  # of the model's output, if a loss over classes was called

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A tensor of torch.func in the place of the data would crash Python.
        if function == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise ArgumentError("model or loss assigns a tensor's .data: keep nothing between calls")
        if function in (F.cross_entropy, F.nll_loss):
            known = {**dict(zip(("input", "target", "weight"), args, strict=False)), **kwargs}
            target, mean = known["target"], known.get("reduction", "mean") == "mean"
            if known.get("weight") is not None and mean and target.numel() == 1:
                raise ArgumentError(
                    "loss with weight=: the mean over one example divides by the weight of its own class, so that "
                    "weights would change nothing; give the loss reduction='sum', which for one example is its "
                    "weighted loss"
                )
            if known["input"].dim() > 1 and known["input"].shape[1] == 1:
                raise ArgumentError(
                    "loss=cross_entropy for a model with one output, for which it is constant: give loss= the function "
                    "to train by, for example torch.nn.functional.mse_loss or binary_cross_entropy_with_logits"
                )
            _check_labels(known["input"], target)
            self.classes = known["input"].shape[min(1, known["input"].dim() - 1)]
        return function(*args, **kwargs)


def _check_labels(output: torch.Tensor, target: torch.Tensor) -> None:
    """Refuse labels of a dtype or shape that a loss over classes does not take; floats must be probabilities."""
    if target.is_floating_point():
        if target.shape != output.shape:
            raise ArgumentError(
                f"loss=cross_entropy with labels of dtype {target.dtype}: must be numbers of classes, labels.long(); "
                "for targets that are measured values give loss=, for example torch.nn.functional.mse_loss"
            )
    elif target.dtype not in (torch.int64, torch.uint8):
        raise ArgumentError(f"loss=cross_entropy with labels of dtype {target.dtype}: must be of int64, labels.long()")
    elif target.dim() == output.dim() > 1 and target.shape[1] == 1:
        raise ArgumentError(
            "loss=cross_entropy with labels of shape (n, 1): must be (n,), a class for each example, labels.squeeze(1)"
        )
