"""Refusal of models that keep values of their examples as plain attributes (``self.last = x.detach()``).

Such a value is private, has no noise, and is saved with the model. Buffers are the probe's own concern; here it is what
forward leaves in a module's ``__dict__``. Two trials on entirely different inputs and one generator state must leave
the same: caches that depend on shapes or parameters alone pass, whether they are filled once or at every call. What is
kept elsewhere (globals, closures of hooks, objects that are no containers) cannot be seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from dpcore.errors import ArgumentError

Held = dict[tuple[str, str], list[Any]]
"""(module's qualified name, attribute) -> copies of the values in it."""

_TORCHS_OWN = ("_parameters", "_buffers", "_modules")


def held(model: nn.Module) -> Held:
    """Return copies of the tensors, arrays and floats in the modules' attributes, also inside of containers."""
    found: Held = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _TORCHS_OWN:
                found[name, attribute] = list(_values(value))
    return found


def check_same(model: nn.Module, first: Held, other: Held) -> None:
    """Refuse a model that holds other values after a trial on other inputs.

    Raises
    ------
    ArgumentError
        Names the module, the attribute and the remedy.
    """
    modules = dict(model.named_modules())
    for name, attribute in other:
        if not _same(first.get((name, attribute), []), other[name, attribute]):
            where = f"module {name!r}" if name else "the model itself"
            raise ArgumentError(
                f"{where} ({type(modules[name]).__name__}) keeps values of its examples in the attribute "
                f"{attribute!r}: use them inside forward only, since they are private and would be saved with the model"
            )


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value.detach().clone()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode() + value.tobytes()
    elif isinstance(value, float):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _values(item)
    elif isinstance(value, (list, tuple, deque, set)):
        for item in value:
            yield from _values(item)


def _same(left: list[Any], right: list[Any]) -> bool:
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.nan_to_num(), b.nan_to_num()):
                return False
        elif repr(a) != repr(b):  # two NaN are the same here
            return False
    return True
