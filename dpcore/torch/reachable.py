"""A walk over everything that some objects hold on to.

It goes on from an object to its attributes and items, to the variables, defaults and globals of functions, to what
methods and partials are bound to, and to attributes of classes. Modules, classes and globals of installed packages are
left out; what a file or an object of a C library holds cannot be seen.
"""

from __future__ import annotations

import functools
import logging
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinMethodType as BuiltinType
from types import CellType, CodeType, FunctionType, GeneratorType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dpcore import errors
from dpcore.torch.randomness import GENERATORS

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
"""Where torch keeps, from the first call on, its wrapper of a function of its own, such as that of checkpoints."""
_INSTALLED = (Path(sysconfig.get_path("stdlib")), Path(errors.__file__).parent)


def walk(roots: Mapping[str, Any], skip: Sequence[Any] = (), most: int | None = None) -> Iterator[tuple[str, Any, str]]:
    """Yield everything that is reachable from the roots, as (path, value, first).

    The path begins with the root's name and is written as in Python, but for variables of a function, which stand like
    attributes. `first` is the path under which the value was met before; empty for what is new, and for plain values.
    What is in `skip` is passed over, and so are items of a container beyond the `most`-th.
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
    module = sys.modules.get(name)
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
    """Return what an object, a class or a module has as its own attributes, without Python's bookkeeping."""
    if isinstance(value, (type, ModuleType)):
        return {n: v for n, v in vars(value).items() if not n.startswith("__") or isinstance(v, FunctionType)}
    held = dict(getattr(value, "__dict__", None) or {})
    for name in _slots(type(value)):  # type: ignore[arg-type]
        if hasattr(value, name):
            held[name] = getattr(value, name)
    if _DYNAMO in held and str(getattr(value, "__module__", "")).startswith("torch."):
        del held[_DYNAMO]
    return held


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in found for name in ([slots] if isinstance(slots, str) else slots)]
    return tuple(name for name in names if not name.startswith("__"))


def _parts(path: str, value: Any, most: int | None) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _OPAQUE) or (isinstance(value, (type, ModuleType)) and not is_own(value)):
        return
    if type(value).__module__.startswith("dpcore.") and not isinstance(value, nn.Module):
        return  # a loss may be a method of what holds the whole run
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
    if isinstance(value, nn.Module):  # its parts stand under its own path, as in `named_parameters`
        for kind in ("_parameters", "_buffers", "_modules"):
            yield from ((_join(path, name), item) for name, item in held[kind].items())
    yield from ((_join(path, name), item) for name, item in held.items())
    if isinstance(value, type):
        yield from ((path, base) for base in value.__mro__[1:])
    elif not isinstance(value, ModuleType):
        yield f"{path}.{type(value).__name__}", type(value)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if isinstance(key, str) and key else f"{path}[{key!r}]"
