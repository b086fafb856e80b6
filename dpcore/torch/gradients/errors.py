"""Why a model's graph is not taken."""

from __future__ import annotations

from typing import Self

from torch.fx import Node


class NotProved(Exception):
    """There is no proof that the examples stay apart: another way of finding gradients must be taken."""

    def at(self, node: Node) -> Self:
        """Return the same reason with the line of the user's code that made an operation."""
        where = node.meta.get("stack_trace") or ""
        return type(self)(f"{self}{f' ({where})' if where else ''}")


class Mixes(NotProved):
    """An operation combines several examples."""


class NotCaptured(NotProved):
    """The model or its loss does something that a graph cannot hold."""
