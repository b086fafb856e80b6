"""Models that the tests build of parts, so that each says in one line what is special about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Called(nn.Module):
    """Calls a function with itself and its inputs; `parts` are what the function finds there: layers and all else."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self, *args, **kwargs)
