"""Why a model's graph is not used."""

from __future__ import annotations

from typing import Self

from torch import nn
from torch.fx import Node


class NotProved(Exception):
    """There is no proof that the examples stay apart: gradients must be found in another way."""

    def at(self, node: Node) -> Self:
        """Return the same reason with the line of the user's code that made an operation."""
        where = node.meta.get("stack_trace") or ""
        return type(self)(f"{self}{f' ({where})' if where else ''}")

    def sentence(self, model: nn.Module) -> str:
        """Return the sentence for the user."""
        return f"model={type(model).__name__}: {self}"


class Mixes(NotProved):
    """An operation combines several examples."""

    def sentence(self, model: nn.Module) -> str:
        """Return the sentence for the user."""
        return (
            f"{super().sentence(model)}, so that examples of a batch are mixed: use operations that treat each example "
            "alone (GroupNorm or LayerNorm for normalization, batch_first=True for sequences); with gradients='one-by-one' "
            "the model sees each example as a batch of one, which is slow"
        )


class NotCaptured(NotProved):
    """The model or its loss does something that a graph cannot hold."""
