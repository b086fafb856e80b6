"""What a function, a module or a plain object does, as a digest: its code, and all the values that the code reads.

Two things with one digest compute the same. Where that cannot be told (an object of a C library, say), there is no
digest, and then nothing is ever replayed: a row of noise must not be added to two sums.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import itertools
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from dpcore.torch.checksum import checksum

# Of exactly these kinds: a subclass may have values and methods of its own.
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.memory_format,
    PosixPath, PurePosixPath, WindowsPath, PureWindowsPath,
)  # fmt: skip

# Containers that are nothing but their items.
_CONTAINERS = (dict, OrderedDict, MappingProxyType, list, tuple, torch.Size, range, set, frozenset, bytearray)

# What Python keeps of enumerations, and adds to as combinations of flags are made.
_OF_ENUMERATIONS = (
    "_member_map_", "_value2member_map_", "_hashable_values_", "_unhashable_values_", "_unhashable_values_map_",
    "_inverted_", "__objclass__", "_value_repr_",
)  # fmt: skip

# By these a function reads what its code does not show.
_UNSEEN = ("eval", "exec", "globals", "open", "input", "__import__")

# Built in, and nothing but a `__dict__`.
_DICT_ONLY = (object, SimpleNamespace)

# Py_TPFLAGS_HEAPTYPE: of all classes that Python code makes, and of no type that is built in, such as float.
_HEAP_TYPE = 1 << 9

# An instance of this size holds what is in its `__dict__`, and nothing that only C can see.
_PLAIN_SIZE = object.__basicsize__ + 16


class NotDescribed(Exception):
    """Something of which cannot be told what it computes; its argument is what kind of thing."""


def digest_of(*values: Any, states: bool = True, quick: bool = False) -> str:
    """Return the SHA-256 of what the values are and do; empty where that is not known.

    Parameters
    ----------
    values : objects
        Modules, functions, or anything that they are made of.
    states : bool
        Whether the values of modules' parameters and buffers count, or only their shapes.
    quick : bool
        Tensors and arrays by a checksum instead of a SHA-256: for every step, where nobody looks for collisions.
    """
    try:
        lines = _Describer(states, quick).lines(*values)
    except (NotDescribed, RecursionError):
        return ""
    return hashlib.sha256(lines.encode()).hexdigest()


def undescribed(*values: Any) -> str:
    """Return the kind of the first thing for which `digest_of` the values is empty; empty if there is none."""
    try:
        _Describer(states=False, quick=True).lines(*values)
    except NotDescribed as found:
        return str(found)
    except RecursionError:
        return "structure nested too deeply"
    return ""


class _Describer:
    def __init__(self, states: bool, quick: bool = False) -> None:
        self._states, self._quick = states, quick
        self._known: dict[int, int] = {}
        self._lines: list[str] = []
        self._kept: list[Any] = []  # so that no other object gets the id of one that was known

    def lines(self, *values: Any) -> str:
        for value in values:
            self.of(value)
        return "\n".join(self._lines)

    def of(self, value: Any) -> None:
        number = isinstance(value, (np.number, np.bool_)) or (isinstance(value, np.dtype) and not value.hasobject)
        if type(value) in _PLAIN or number:
            self._lines.append(f"{type(value).__name__} {value!r}")
            return
        if id(value) in self._known:
            self._lines.append(f"known {self._known[id(value)]}")
            return
        self._known[id(value)] = len(self._known)
        self._kept.append(value)
        self._lines.append(f"({type(value).__qualname__}")
        try:
            self._new(value)
        except NotDescribed as cause:
            named = value if isinstance(value, (FunctionType, type)) else type(value)
            raise NotDescribed(*(cause.args or [named.__qualname__])) from None
        self._lines.append(")")

    def _new(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray):
            if value.dtype.hasobject or type(value) not in (np.ndarray, np.memmap):
                raise NotDescribed
            content = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy())
            self._lines.append(f"{value.shape} {value.dtype}")
            self._tensor(content)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.of(key)
                self.of(item)
            self._more(value)
        elif isinstance(value, Set):  # the order of a set changes from process to process
            self._lines += sorted(_Describer(self._states, self._quick).lines(item) for item in value)
            self._more(value)
        elif isinstance(value, Sequence):
            for item in value:
                self.of(item)
            self._more(value)
        elif isinstance(value, enum.Enum):
            self.of(type(value))
            self.of({name: item for name, item in vars(value).items() if name not in _OF_ENUMERATIONS})
        elif type(value) in (logging.Logger, logging.RootLogger):  # what it writes shapes no sum
            self._lines.append(value.name)
        elif isinstance(value, functools.partial):
            self.of((value.func, value.args, value.keywords, vars(value)))
        elif isinstance(value, MethodType):
            self.of((value.__func__, value.__self__))
        elif isinstance(value, ModuleType):
            self._python_module(value)
        elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            library = _library(_origin(value))
            if library is not None:
                self._lines.append(f"{library} {value.__qualname__}")
                if isinstance(value, FunctionType):  # made by the library, perhaps of values of the caller
                    self._held(value)
                elif isinstance(value, BuiltinFunctionType) and not isinstance(
                    value.__self__, (type(None), ModuleType)
                ):
                    self.of(value.__self__)
            elif isinstance(value, FunctionType):
                self._function(value)
            elif isinstance(value, type):
                self._class(value)
            else:
                raise NotDescribed
        else:
            self._object(value)

    def _module(self, module: nn.Module) -> None:
        self.of(type(module))
        _demand_no_slots(module)
        for name, value in sorted(vars(module).items()):
            if name == "training" or (isinstance(value, dict) and not value):  # the first changes from step to step
                continue
            self._lines.append(name)
            if name in ("_parameters", "_buffers") and not self._states:
                for key, tensor in value.items():
                    known = "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
                    self._lines.append(f"{key} {known}")
            elif isinstance(value, dict) and "hooks" in name:  # by number, and numbers change from process to process
                for item in value.values():
                    self.of(item)
            else:
                self.of(value)

    def _function(self, function: FunctionType) -> None:
        self._lines.append(f"{function.__module__}.{function.__qualname__}")
        self._held(function)
        self._code(function.__code__, function.__globals__)

    def _held(self, function: FunctionType) -> None:
        """What a function was made with: defaults, attributes, and the variables around it."""
        self.of((function.__defaults__, function.__kwdefaults__, vars(function)))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # empty so far
                continue
            self.of(content)

    def _code(self, code: CodeType, names: Mapping[str, Any]) -> None:
        self._lines.append(f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {code.co_names} {code.co_varnames}")
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._code(constant, names)
            else:
                self.of(constant)
        for name, *attributes in _reads(code):
            if name not in names:
                if name in _UNSEEN:
                    raise NotDescribed
                continue
            self._lines.append(name)
            value = names[name]
            for attribute in attributes:  # `settings.rate`: not all of the module
                if not _is_own_module(value):
                    break
                if not hasattr(value, attribute):
                    raise NotDescribed
                self._lines.append(attribute)
                value = getattr(value, attribute)
            self.of(value)

    def _python_module(self, module: ModuleType) -> None:
        library = _library(module.__name__)
        if library is not None:
            self._lines.append(library)
            return
        path = getattr(module, "__file__", None)
        if path is None:
            raise NotDescribed
        self._lines.append(f"{module.__name__} {_file_digest(path)}")
        for name, value in sorted(vars(module).items()):  # what it imported, and what was set since
            if not name.startswith("__"):
                self._lines.append(name)
                self.of(value)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            library = _library(base.__module__)
            self._lines.append(f"{library or base.__module__} {base.__qualname__}")
            if library is not None:
                continue
            for name, value in sorted(vars(base).items()):
                if name.startswith("__") and not isinstance(value, FunctionType):
                    continue  # __doc__, __dict__, __weakref__, ...
                if issubclass(base, enum.Enum) and (name in base.__members__ or name in _OF_ENUMERATIONS):
                    continue  # the members follow below
                self._lines.append(name)
                self._member(value)
            if issubclass(base, enum.Enum):
                self.of(list(base.__members__.items()))

    def _member(self, value: Any) -> None:
        if isinstance(value, (staticmethod, classmethod)):
            self.of(value.__func__)
        elif isinstance(value, property):
            self.of((value.fget,))
        elif isinstance(value, functools.cached_property):
            self.of(value.func)
        elif type(value).__name__ in ("member_descriptor", "getset_descriptor", "_abc_data", "_tuplegetter"):
            self._lines.append(type(value).__name__)
        else:
            self.of(value)

    def _object(self, value: Any) -> None:
        """An instance of some class: what it can do, and all that it holds."""
        built_in = any(not kind.__flags__ & _HEAP_TYPE for kind in type(value).__mro__ if kind not in _DICT_ONLY)
        if built_in or not hasattr(value, "__dict__") or type(value).__basicsize__ > _PLAIN_SIZE:
            raise NotDescribed
        _demand_no_slots(value)
        self.of(type(value))
        self.of(vars(value))

    def _more(self, container: Any) -> None:
        """What a container of the caller's own has beside its items."""
        if type(container) in _CONTAINERS:
            return
        _demand_no_slots(container)
        self.of(type(container))
        self.of(getattr(container, "__dict__", None))

    def _tensor(self, tensor: torch.Tensor) -> None:
        try:
            if self._quick:
                self._lines.append(f"{tuple(tensor.shape)} {tensor.dtype} {int(checksum(tensor))}")
                return
            whole = tensor.detach().contiguous().cpu().reshape(-1)
            content = whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        except (RuntimeError, TypeError, NotImplementedError) as cause:  # sparse, nested, quantized
            raise NotDescribed from cause
        self._lines.append(f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(content).hexdigest()}")


@functools.lru_cache(maxsize=1024)
def _reads(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the global names that the code reads, each with the attributes taken of it at once.

    Raises
    ------
    NotDescribed
        If it imports a module of the caller's: which file that is, and what it imports itself, is not known here.
    """
    steps = [(one.opname, one.argval) for one in dis.get_instructions(code)]
    found: dict[tuple[str, ...], None] = {}
    for place, (operation, name) in enumerate(steps):
        if operation == "IMPORT_NAME" and (steps[place - 2][1] or _library(name) is None):
            raise NotDescribed
        if operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            attributes = itertools.takewhile(lambda step: step[0] in ("LOAD_ATTR", "LOAD_METHOD"), steps[place + 1 :])
            found[name, *(attribute for _, attribute in attributes)] = None
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _origin(value: Any) -> str:
    """Return the name of the module where something was made; of a function's `__module__` wrappers make another."""
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", "__main__"))
    return getattr(value, "__module__", None) or "builtins"


def _demand_no_slots(value: Any) -> None:
    """Refuse values beside `__dict__`."""
    for base in type(value).__mro__:
        names = vars(base).get("__slots__", ())
        if set([names] if isinstance(names, str) else names) - {"__dict__", "__weakref__"}:
            raise NotDescribed


def _is_own_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and _library(value.__name__) is None


@functools.lru_cache(maxsize=256)
def _library(name: str) -> str | None:
    """Return the name with the version of the package it belongs to; None for code of the caller's own.

    dpcore itself counts as one: its code has a digest of its own.
    """
    top = name.partition(".")[0]
    package = sys.modules.get(top)
    version, path = getattr(package, "__version__", None), getattr(package, "__file__", None)
    if top == "dpcore":
        return name
    # A file of the caller's may hide a module of Python's by its name.
    if top in sys.stdlib_module_names and (path is None or Path(path).is_relative_to(Path(os.__file__).parent)):
        return name if top != "__main__" else None
    installed = path is not None and any(part in ("site-packages", "dist-packages") for part in Path(path).parts)
    return f"{name} {version}" if version is not None and installed else None
