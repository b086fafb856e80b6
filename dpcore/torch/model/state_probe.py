"""Finds what a model or a loss keeps from one call to the next, on synthetic examples and again on the first real ones.

Such state is private, has no noise, is saved with the model, and lets one example move the gradients of others by more
than the clip norm. Nothing is proved about code: everything reachable from model and loss (`reachable`) is compared
before and after the very calls that training makes.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import CellType, FunctionType, GeneratorType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._C import _functorch
from torch.nn.modules import module as torchs_own

from dpcore.torch.randomness import GENERATORS, generator_state, same_state, set_generator_state
from dpcore.torch.reachable import ITEMS, PLAIN, attributes, global_names, is_own, walk

GLOBAL_HOOKS = {
    f"torch.nn.modules.module.{name}": getattr(torchs_own, name)
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
}
"""Hooks on all modules: code of the caller's that belongs to every model."""


def keeps(path: str) -> str:
    """Return the sentence that refuses something which changes while gradients are taken."""
    return (
        f"{path} changes while gradients are taken: what model or loss keep of examples is private, has no noise and "
        "reaches the gradients of others; use values inside forward and loss only, and keep nothing between calls"
    )


class Snapshot:
    """The values of everything reachable from some objects, at one moment.

    `skip` is passed over, and so are items of a container beyond the `most`-th.
    """

    def __init__(self, roots: Mapping[str, Any], skip: Sequence[Any] = (), most: int | None = None) -> None:
        self._values: dict[str, list[Any]] = {}
        self._undo: list[Callable[[], None]] = []
        for path, value, first in walk(roots, skip, most):
            self._values.setdefault(path, []).append(f"is {first}" if first else self._value(value))

    def changed(self, later: Snapshot) -> str | None:
        """Return the path of the first thing that is otherwise at another moment, or None."""
        for path, values in later._values.items():
            known = self._values.get(path, [])
            if len(known) != len(values) or not all(map(_same, known, values)):
                return path
        return next((path for path in self._values if path not in later._values), None)

    def restore(self) -> None:
        """Put everything back as it was at this moment."""
        for undo in self._undo:
            undo()

    def _value(self, value: Any) -> Any:
        """Return what tells a changed object from an unchanged one, beside its parts; note how to put it back."""
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, GENERATORS):
            state = generator_state(value)
            self._undo.append(lambda: set_generator_state(value, state))
            return state
        if isinstance(value, functools._lru_cache_wrapper):
            misses = value.cache_info().misses
            self._undo.append(lambda: None if value.cache_info().misses == misses else value.cache_clear())
            return misses
        if isinstance(value, GeneratorType):
            return None if value.gi_frame is None else value.gi_frame.f_lasti
        if type(value).__module__.startswith("dpcore.") and not isinstance(value, nn.Module):
            return type(value)  # what holds the run is no state of the model, and must not be put back
        held = self._attributes(value)
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return self._array(value)
        if isinstance(value, (dict, list, deque, set, bytearray)):
            items = _items(value)
            self._undo.append(lambda: _refill(value, items))
        elif isinstance(value, CellType):
            with suppress(ValueError):  # empty
                content = value.cell_contents
                self._undo.append(lambda: setattr(value, "cell_contents", content))
        elif isinstance(value, FunctionType):
            used = {name: value.__globals__[name] for name in global_names(value)}
            self._undo.append(lambda: value.__globals__.update(used))
        elif not held and not isinstance(value, (Mapping, *ITEMS, type, ModuleType)):
            text = repr(value)  # a counter of itertools, say, shows its state only so
            return type(value) if " at 0x" in text else text
        return type(value)

    def _attributes(self, value: Any) -> dict[str, Any]:
        if isinstance(value, (type, ModuleType)) and not is_own(value):
            return {}
        held = attributes(value)
        self._undo.append(lambda: _put_back(value, held))
        return held

    def _array(self, value: Any) -> Any:
        while isinstance(value, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(value):
            value = _functorch.get_unwrapped(value)  # kept by an earlier call, and unusable after it
        inner = value.detach() if isinstance(value, torch.Tensor) else value
        kept = inner.clone() if isinstance(inner, torch.Tensor) else inner.copy()

        def undo() -> None:
            if not _same(kept, inner):
                inner[...] = kept

        self._undo.append(undo)
        return kept


def _items(container: Any) -> list[Any]:
    return [part for item in container.items() for part in item] if isinstance(container, dict) else list(container)


def _refill(container: Any, items: list[Any]) -> None:
    """Give a container the items that it had."""
    now = _items(container)
    if len(now) == len(items) and all(a is b for a, b in zip(now, items, strict=True)):
        return
    container.clear()
    if isinstance(container, dict):
        container.update(zip(items[::2], items[1::2], strict=True))
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)


def _put_back(owner: Any, held: dict[str, Any]) -> None:
    """Give an object, a class or a module the attributes that it had."""
    now = attributes(owner)
    for name in now.keys() - held.keys():
        delattr(owner, name)
    for name, item in held.items():
        if name in now and now[name] is item:
            continue
        if isinstance(owner, type) or isinstance(getattr(type(owner), name, None), MemberDescriptorType):
            setattr(owner, name, item)
        else:
            vars(owner)[name] = item  # not through an nn.Module's own __setattr__


def _same(left: Any, right: Any) -> bool:
    """Whether two values are equal; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
            return False
        if left.layout is not torch.strided:
            left, right = left.to_dense(), right.to_dense()
        return torch.equal(left, right) or (
            left.is_floating_point() and torch.equal(left.nan_to_num(), right.nan_to_num())
        )
    if isinstance(left, np.ndarray):
        return bool((left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes()))
    if isinstance(left, dict):  # the state of a generator
        return same_state(left, right)
    return left is right or repr(left) == repr(right)
