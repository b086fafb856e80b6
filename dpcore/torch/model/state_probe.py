"""Finds state that a model or a loss keeps between calls, on synthetic examples and again on the first real ones.

Such state is private, has no noise, is saved with the model, and lets one example move the gradients of others by more
than the clip norm. Nothing is proved about code: everything reachable from model and loss (`walk`) is compared
before and after the very calls that training makes.
"""

from __future__ import annotations

import functools
import logging
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import BuiltinMethodType as BuiltinType
from types import (
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torchs_own
from torch.utils.hooks import RemovableHandle

from dpcore import errors
from dpcore.torch.randomness import GENERATORS, generator_state, same_state, set_generator_state

GLOBAL_HOOKS = {
    f"torch.nn.modules.module.{name}": getattr(torchs_own, name)
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
}
"""Hooks on all modules: code of the caller's that belongs to every model."""


def keeps(path: str) -> str:
    """Return the sentence that refuses something which changes while gradients are taken."""
    return (
        f"{path} changes while gradients are taken: values that model or loss keep are private, have no noise and "
        "reach the gradients of others; use values inside forward and loss only, and keep nothing between calls"
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
        """Return a value that shows whether an object changed, apart from its parts; note how to restore it."""
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
            return type(value)  # dpcore's own objects are no state of the model, and must not be restored
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


def _put_back(owner: Any, earlier: dict[str, Any]) -> None:
    """Give an object, a class or a module the attributes that it had."""
    now = attributes(owner)
    for name in now.keys() - earlier.keys():
        delattr(owner, name)
    for name, item in earlier.items():
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


PLAIN = (bool, int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device, torch.Size, np.generic)
ITEMS = (list, tuple, deque, set, frozenset, bytearray)

_OPAQUE = (logging.Logger, logging.Handler, weakref.ref, CodeType, RemovableHandle, *GENERATORS)
# fmt: off
_WRAPPERS = {
    MethodType: ("__self__", "__func__"), BuiltinType: ("__self__",), functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",), classmethod: ("__func__",), property: ("fget",),
    functools.cached_property: ("func",), CellType: ("cell_contents",)
}
# fmt: on
_DYNAMO = "__dynamo_disable"
"""The attribute with torch's wrapper, from the first call on, of its own functions, such as that of checkpoints."""
_INSTALLED = (Path(sysconfig.get_path("stdlib")), Path(errors.__file__).parent)


def walk(roots: Mapping[str, Any], skip: Sequence[Any] = (), most: int | None = None) -> Iterator[tuple[str, Any, str]]:
    """Yield everything that is reachable from the roots, as (path, value, first).

    The path begins with the root's name and is written as in Python, except that variables of a function look like
    attributes. `first` is the path under which the value was met before; empty for new ones, and for plain values.
    Values in `skip` are passed over, and so are items of a container beyond the `most`-th.
    """
    seen = {id(value): (value, "what is skipped") for value in skip}
    pending: list[tuple[str, Any]] = list(roots.items())[::-1]
    while pending:
        path, value = pending.pop()
        if isinstance(value, PLAIN):
            yield path, value, ""
        elif id(value) in seen:
            yield path, value, seen[id(value)][1]
        else:
            seen[id(value)] = value, path  # kept, so that no other object gets its id
            yield path, value, ""
            pending += reversed(list(_parts(path, value, most)))


def is_own(value: Any) -> bool:
    """Whether a function, class or module is the caller's code, and not of an installed package."""
    if isinstance(value, FunctionType):
        return not _is_installed(value.__code__.co_filename)
    return _is_own_module(value.__name__ if isinstance(value, ModuleType) else value.__module__)


@functools.lru_cache(maxsize=1024)
def _is_own_module(name: str) -> bool:
    module = sys.modules.get(name) or sys.modules.get(name.partition(".")[0])  # torch.ops.aten is in no table
    file = getattr(module, "__file__", None)
    return not _is_installed(file) if file else name == "__main__" or module is None


@functools.lru_cache(maxsize=1024)
def _is_installed(file: str) -> bool:
    path = Path(file)
    packages = "site-packages" in path.parts or "dist-packages" in path.parts
    return packages or file.startswith("<frozen") or any(path.is_relative_to(folder) for folder in _INSTALLED)


def global_names(function: FunctionType) -> Iterator[str]:
    """Yield the names of globals that a function of the caller's reads."""
    codes = [function.__code__] if is_own(function) else []
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield from (name for name in code.co_names if name in function.__globals__)


def attributes(value: Any) -> dict[str, Any]:
    """Return the own attributes of an object, a class or a module, without Python's bookkeeping."""
    if isinstance(value, (type, ModuleType)):
        return {n: v for n, v in vars(value).items() if not n.startswith("__") or isinstance(v, FunctionType)}
    own = dict(getattr(value, "__dict__", None) or {})
    for name in _slots(type(value)):  # type: ignore[arg-type]
        if hasattr(value, name):
            own[name] = getattr(value, name)
    if _DYNAMO in own and str(getattr(value, "__module__", "")).startswith("torch."):
        del own[_DYNAMO]
    return own


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    declared = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return tuple(name for name in names if not name.startswith("__"))


def _parts(path: str, value: Any, most: int | None) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _OPAQUE) or (isinstance(value, (type, ModuleType)) and not is_own(value)):
        return
    if type(value).__module__.startswith("dpcore.") and not isinstance(value, nn.Module):
        return  # a loss may be a method of the object that has the whole run
    if isinstance(value, (dict, MappingProxyType)):
        yield from ((_join(path, key), value[key]) for key in list(value)[:most])
    elif isinstance(value, ITEMS):
        yield from ((f"{path}[{place}]", item) for place, item in enumerate(list(value)[:most]))
    for name in _WRAPPERS.get(type(value), ()):
        try:
            yield path, getattr(value, name)
        except ValueError:  # an empty cell
            continue
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f"{path}.{name}", cell) for name, cell in cells)
        yield from ((path, value.__defaults__), (path, value.__kwdefaults__))
        yield from ((f"{path}.{name}", value.__globals__[name]) for name in global_names(value))
    if isinstance(value, GeneratorType) and value.gi_frame is not None:
        yield from ((f"{path}.{name}", item) for name, item in value.gi_frame.f_locals.items())
    held = attributes(value)
    if isinstance(value, nn.Module):  # its parts are under its own path, as in `named_parameters`
        for kind in ("_parameters", "_buffers", "_modules"):
            yield from ((_join(path, name), item) for name, item in held[kind].items())
    yield from ((_join(path, name), item) for name, item in held.items())
    if isinstance(value, type):
        yield from ((path, base) for base in value.__mro__[1:])
    elif not isinstance(value, ModuleType):
        yield f"{path}.{type(value).__name__}", type(value)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if isinstance(key, str) and key else f"{path}[{key!r}]"
