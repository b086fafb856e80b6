"""What a function, a module or a plain object does, as a digest: its code, and all the values that the code reads.

Two things with one digest compute the same. Where that cannot be told (an object of a C library, say), there is no
digest, and then nothing is ever replayed: a row of noise must not be added to two sums.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.memory_format)


class NotDescribed(Exception):
    """Something of which cannot be told what it computes."""


def digest_of(*values: Any, states: bool = True) -> str:
    """Return the SHA-256 of what the values are and do; empty where that is not known.

    Parameters
    ----------
    values : objects
        Modules, functions, or anything that they are made of.
    states : bool
        Whether the values of modules' parameters and buffers count, or only their shapes.
    """
    describer = _Describer(states)
    try:
        lines = "\n".join(line for value in values for line in describer.of(value))
    except (NotDescribed, RecursionError):
        return ""
    return hashlib.sha256(lines.encode()).hexdigest()


class _Describer:
    def __init__(self, states: bool) -> None:
        self._states = states
        self._known: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no other object gets the id of one that was known

    def of(self, value: Any) -> Iterator[str]:
        if isinstance(value, (*_PLAIN, enum.Enum)):
            yield repr(value)
            return
        if id(value) in self._known:
            yield f"known {self._known[id(value)]}"
            return
        self._known[id(value)] = len(self._known)
        self._kept.append(value)
        yield f"({type(value).__qualname__}"
        yield from self._new(value)
        yield ")"

    def _new(self, value: Any) -> Iterator[str]:
        if isinstance(value, nn.Module):
            yield from self._module(value)
        elif isinstance(value, torch.Tensor):
            yield from _bytes_of(value.detach().contiguous().cpu())
        elif isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise NotDescribed
            yield f"{value.shape} {value.dtype} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from (*self.of(key), *self.of(item))
        elif isinstance(value, Set):  # the order of a set changes from process to process
            yield from sorted("\n".join(_Describer(self._states).of(item)) for item in value)
        elif isinstance(value, Sequence):
            for item in value:
                yield from self.of(item)
        elif isinstance(value, functools.partial):
            yield from (*self.of(value.func), *self.of(value.args), *self.of(value.keywords))
        elif isinstance(value, MethodType):
            yield from (*self.of(value.__func__), *self.of(value.__self__))
        elif isinstance(value, ModuleType):
            yield from _python_module(value)
        elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            library = _library(getattr(value, "__module__", None) or "builtins")
            if library is not None:
                yield f"{library} {value.__qualname__}"
            elif isinstance(value, FunctionType):
                yield from self._function(value)
            elif isinstance(value, type):
                yield from self._class(value)
            else:
                raise NotDescribed
        else:
            yield from self._object(value)

    def _module(self, module: nn.Module) -> Iterator[str]:
        yield from self.of(type(module))
        for name, value in sorted(vars(module).items()):
            if name == "training":  # changes from step to step
                continue
            yield name
            if name in ("_parameters", "_buffers") and not self._states:
                for key, tensor in value.items():
                    known = "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
                    yield f"{key} {known}"
            elif isinstance(value, dict) and "hooks" in name:  # by number, and numbers change from process to process
                for item in value.values():
                    yield from self.of(item)
            else:
                yield from self.of(value)

    def _function(self, function: FunctionType) -> Iterator[str]:
        yield f"{function.__module__}.{function.__qualname__}"
        yield from self.of((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # empty so far
                continue
            yield from self.of(content)
        yield from self._code(function.__code__, function.__globals__)

    def _code(self, code: CodeType, names: Mapping[str, Any]) -> Iterator[str]:
        yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}"
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from self._code(constant, names)
            else:
                yield from self.of(constant)
        for name in sorted({one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}):
            if name in names:
                yield name
                yield from self.of(names[name])

    def _class(self, kind: type) -> Iterator[str]:
        for base in kind.__mro__:
            library = _library(base.__module__)
            yield f"{library or base.__module__} {base.__qualname__}"
            if library is not None:
                continue
            for name, value in sorted(vars(base).items()):
                if name.startswith("__") and not isinstance(value, FunctionType):
                    continue  # __doc__, __dict__, __weakref__, ...
                yield name
                yield from self._member(value)

    def _member(self, value: Any) -> Iterator[str]:
        if isinstance(value, (staticmethod, classmethod)):
            yield from self.of(value.__func__)
        elif isinstance(value, property):
            yield from self.of((value.fget,))
        elif isinstance(value, functools.cached_property):
            yield from self.of(value.func)
        elif type(value).__name__ in ("member_descriptor", "getset_descriptor", "_abc_data"):
            yield type(value).__name__
        else:
            yield from self.of(value)

    def _object(self, value: Any) -> Iterator[str]:
        """An instance of some class: what it can do, and all that it holds."""
        if not hasattr(value, "__dict__"):
            raise NotDescribed
        yield from self.of(type(value))
        yield from self.of(vars(value))


def _bytes_of(tensor: torch.Tensor) -> Iterator[str]:
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    yield f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(content).hexdigest()}"


def _python_module(module: ModuleType) -> Iterator[str]:
    library = _library(module.__name__)
    if library is not None:
        yield library
        return
    path = getattr(module, "__file__", None)
    if path is None:
        raise NotDescribed
    yield f"{module.__name__} {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"


@functools.lru_cache(maxsize=256)
def _library(name: str) -> str | None:
    """Return the name with the version of the package it belongs to; None for code of the caller's own.

    dpcore itself counts as one: its code has a digest of its own.
    """
    top = name.partition(".")[0]
    if top in (*sys.stdlib_module_names, "dpcore") and top != "__main__":
        return name
    package = sys.modules.get(top)
    version, path = getattr(package, "__version__", None), getattr(package, "__file__", None)
    installed = path is not None and any(part in ("site-packages", "dist-packages") for part in Path(path).parts)
    return f"{name} {version}" if version is not None and installed else None
