"""The messages by which fully_shard gathers a layer, each noted by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpcore.errors import PrivacyError
from dpcore.mechanism.peers import LOST

Note = Callable[[str], None]
"""Is told of each message, so that processes can compare their order."""


class NotedGather:
    """Another all-gather, as `FSDPModule.set_custom_all_gather` takes one, that is told of before it is done.

    Notes
    -----
    A gathering joins what each process sends as its next message. Two processes that run layers in different orders
    would join the shards of different layers, and train on values that no layer has; what one example does to the order
    in its process would reach the gradients of others. So the orders are compared before a sum is released.
    """

    def __init__(self, real: Any, name: str, note: Note) -> None:
        self._real, self._name, self._note = real, name, note

    def allocate(self, *arguments: Any, **options: Any) -> Any:
        """Allocate as the other one does."""
        return self._real.allocate(*arguments, **options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Note the message, and send it."""
        self._note(self._name)
        try:
            return self._real(*arguments, **options)
        except RuntimeError as cause:  # what torch.distributed raises where a process is gone
            raise PrivacyError(LOST) from cause
