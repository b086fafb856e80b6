"""Sentences for losses that do not fit the model, the data, or a batch of one example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dpcore.errors import ArgumentError


def check_targets(loss: Callable[..., Any], targets: Sequence[Any]) -> None:
    """Refuse a third tensor of the data under the default loss, which would take it for the weights of classes."""
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
    """Refuses losses that are another function for a batch of one, and what torch.func cannot survive."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: int | None = None  # of the model's output, where a loss over classes was called

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A tensor of torch.func's in the place of the data would crash Python.
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
                    "loss=cross_entropy for a model with one output, of which it is constant: give loss= the function "
                    "to train by, for example torch.nn.functional.mse_loss or binary_cross_entropy_with_logits"
                )
            _check_labels(known["input"], target)
            self.classes = known["input"].shape[min(1, known["input"].dim() - 1)]
        return function(*args, **kwargs)


def _check_labels(output: torch.Tensor, target: torch.Tensor) -> None:
    """Refuse labels of a dtype or shape that a loss over classes does not take; of floats it takes probabilities."""
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
