"""What a Trainer's data, collator and loss are to `make_private`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import is_datasets_available


def data_of(trainer: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
    """Return a trainer's training data and what joins its examples, without the columns that the model does not take.

    Labels are the batch's target, and no input of the model, where the loss is not the model's own.
    """
    data, collate = trainer.train_dataset, trainer.data_collator
    if is_datasets_available() and _is_table(data):
        data = trainer._remove_unused_columns(data, description="training")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="training")
    return data, collate if _loss_of_labels(trainer) is None else LabelsApart(collate)


def loss_of(trainer: Any) -> Callable[..., Any]:
    """Return the loss of one example: `compute_loss_func`, the smoothed one, or what the model returns."""
    return _loss_of_labels(trainer) or returned_loss


def returned_loss(output: Any) -> Any:
    """Return the loss that a model of transformers computes where its inputs have labels."""
    return output["loss"] if isinstance(output, dict) else output[0]


@dataclass(frozen=True)
class LabelsApart:
    """Joins examples to ``(inputs, labels)``, as Trainer takes the labels out for a loss that is not the model's."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, examples: list[Any]) -> Any:
        """Return the batch."""
        inputs = dict(self.collate(examples))
        return (inputs, inputs.pop("labels")) if "labels" in inputs else (inputs,)


@dataclass(frozen=True)
class LossFunction:
    """A `compute_loss_func`, of one example: it is told no number of items in a batch."""

    function: Callable[..., Any]

    def __call__(self, output: Any, labels: Any = None) -> Any:
        """Return the loss."""
        return self.function(output, labels, num_items_in_batch=None)


@dataclass(frozen=True)
class Smoothed:
    """Trainer's label smoothing, over the labels of one example."""

    smoother: Callable[..., Any]
    shift_labels: bool

    def __call__(self, output: Any, labels: Any) -> Any:
        """Return the loss."""
        return self.smoother(output, labels, shift_labels=self.shift_labels)


def _loss_of_labels(trainer: Any) -> Callable[..., Any] | None:
    if trainer.compute_loss_func is not None:
        return LossFunction(trainer.compute_loss_func)
    if trainer.label_smoother is None:
        return None
    model = trainer.accelerator.unwrap_model(trainer.model)
    while hasattr(model, "base_model") and type(model).__module__.startswith("peft."):
        model = model.base_model.model if hasattr(model.base_model, "model") else model.base_model
    return Smoothed(trainer.label_smoother, type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def _is_table(data: Any) -> bool:
    import datasets

    return isinstance(data, datasets.Dataset)
