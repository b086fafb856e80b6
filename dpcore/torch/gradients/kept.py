"""Tensors without values must not outlive a capture: the model's code would meet them in a later call.

What the model itself holds is put back as it was (`dpcore.torch.model.state_probe`). Tables that a library's code makes
once lie elsewhere: in caches of functools, which are emptied here, or in a place that cannot be put back, which is refused.
"""

from __future__ import annotations

import gc
import weakref
from functools import _lru_cache_wrapper
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from dpcore.errors import ArgumentError

_DEEP = 6
"""A cache's result may be a tensor, or what holds one through so many objects and containers."""

_ENDS = (FunctionType, MethodType, ModuleType, type, nn.Module)
"""What leads to nearly everything, and is no result."""


class Made:
    """The tensors that were made while a model was captured, and where in the code."""

    def __init__(self) -> None:
        self._notes: list[tuple[weakref.ref[torch.Tensor], str]] = []

    def note(self, result: Any, where: str = "") -> None:
        """Note the tensors of an operation's result; they are not kept alive."""
        for leaf in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(leaf, torch.Tensor):
                self._notes.append((weakref.ref(leaf), where))

    def empty_caches(self) -> None:
        """Empty the caches of functools that hold such tensors; those with others alone stay as they are."""
        alive = {id(tensor) for ref, _ in self._notes if (tensor := ref()) is not None}
        if alive:
            for cache in [each for each in gc.get_objects() if type(each) is _lru_cache_wrapper]:
                if _holds(cache, alive):
                    cache.cache_clear()

    def refuse_left(self, model: nn.Module) -> None:
        """Refuse a model whose code has put such a tensor where it stays."""
        if not self._left():
            return
        gc.collect()  # cycles keep some alive that nothing leads to
        for where in self._left():
            raise ArgumentError(
                f"model={type(model).__name__}: its code keeps a tensor of one call for later ones where it cannot be "
                f"taken out again{f' ({where})' if where else ''}: keep it in a buffer, or under functools.lru_cache; "
                "of code that is not yours, call the model once before make_private, in a new process, so that what it "
                "keeps is there already"
            )

    def _left(self) -> list[str]:
        return [where for ref, where in self._notes if ref() is not None]


def _holds(cache: Any, tensors: set[int]) -> bool:
    level = [cache]
    for _ in range(_DEEP):
        level = [each for each in gc.get_referents(*level) if not issubclass(type(each), _ENDS)]
        if not tensors.isdisjoint(map(id, level)):
            return True
    return False
