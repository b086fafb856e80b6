"""The proved graphs of this process: equal models, as in a sweep of settings, are captured once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.model.state_probe import is_own

_MOST = 32
_known: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def get(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return the graph of a key; make it if there is none."""
    if key in _known:
        _known.move_to_end(key)
        return _known[key][1]
    program = make()
    if program.shareable:
        _known[key] = key, program
        while len(_known) > _MOST:
            _known.popitem(last=False)
    return program


def structure(batch: Tree) -> Hashable:
    """Return the form of a batch: its containers, and shape, dtype and device of one example of each tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[1:], batch.dtype, batch.device
    found = batches.parts(batch)
    return type(batch), found and (tuple(found.names), tuple(map(structure, found.values)))


def python_state(roots: Sequence[Any]) -> Hashable:
    """Return the modes, plain attributes and hooks of all modules: what their code may read and a user may change."""
    found: list[Hashable] = []
    for root in roots:
        if not isinstance(root, nn.Module):
            continue
        for module in root.modules():
            held = module.__dict__
            kinds: list[Any] = [type(module), type(module).forward]
            found += kinds
            for value in held.values():
                kind: Any = type(value)
                if kind in _PLAIN:
                    found.append(value)
                elif _is_kept(kind):
                    # A tensor that is no buffer is a constant of the graph, and a function may replace forward. The
                    # objects themselves are kept, since a new object may get the id of a deleted one.
                    found.append(_Same(value))
            if root is not roots[0]:
                found += [_Same(value) for value in (*module._buffers.values(), *module._parameters.values())]
            found += [
                tuple(map(_Same, held[name].values()))
                for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
                if held.get(name)
            ]
    return tuple(found)


@cache
def _is_kept(kind: type) -> bool:
    """Whether it is a tensor's class or a function's; computed once a class, since torch's own answer is slow."""
    return issubclass(kind, (torch.Tensor, FunctionType, MethodType))


def equal_models(model: nn.Module, loss: Any, names: Sequence[str]) -> tuple[Hashable, ...]:
    """Return a key, equal for models with equal graphs: modules, their attributes, tensors' forms, and the loss."""
    met: dict[int, int] = {}
    parts: list[Hashable] = [tuple(names), _value(loss, met) if not isinstance(loss, nn.Module) else None]
    device = next(model.parameters()).device
    parts += [torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type), torch.is_grad_enabled()]
    numbers: dict[int, int] = {}  # ties
    modules: dict[int, int] = {}  # a module may be in several places
    for root in (model, loss):
        if not isinstance(root, nn.Module):
            continue
        for name, module in root.named_modules(remove_duplicate=False):
            known = len(modules)
            parts += [name, modules.setdefault(id(module), known)]
            if modules[id(module)] < known:
                continue
            kind: Any = type(module)
            bases = [base for base in kind.__mro__ if not base.__module__.startswith("torch.")]
            methods = (getattr(each, "__func__", each) for base in bases for each in vars(base).values())
            parts += [kind, kind.forward, *(_read(each, met) for each in (kind.forward, *methods))]
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None:
                        number = numbers.setdefault(id(tensor), len(numbers))
                        parts.append((key, number, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad))
            own = {k: v for k, v in vars(module).items() if k not in _TORCHS}
            parts += [(key, _value(value, met)) for key, value in own.items()]
    return tuple(parts)


_TORCHS = frozenset(vars(nn.Module())) - {"training"} | {
    "_flat_weights",
    "_flat_weight_refs",
    "_flat_weights_names",
    "_all_weights",
}


_OBJECTS = 10_000
"""Beyond this number of objects, every further one counts as unequal to all others."""
_ENTRIES = 100
"""Longer lists that a function reads are taken for data, and not compared."""


def _value(value: Any, met: dict[int, int]) -> Hashable:
    """Return a key, equal for equal values; the object itself if it cannot be compared by its parts.

    An object with nothing but attributes, such as a configuration, is compared by them. `met` numbers such objects, so
    that one object in two places differs from two equal ones.
    """
    kind: Any = type(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, (tuple, list)):
        return kind, tuple(_value(each, met) for each in value)
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(_value(each, met) for each in value)
    if isinstance(value, dict):
        return kind, tuple((_value(k, met), _value(v, met)) for k, v in value.items())
    if isinstance(value, FunctionType):
        return _Same(value), _read(value, met)
    if isinstance(value, (nn.Module, type)) or not _has_only_attributes(kind) or len(met) >= _OBJECTS:
        return _Same(value)
    known = len(met)
    number = met.setdefault(id(value), known)
    return (kind, number) if number < known else (kind, number, _value(vars(value), met))


def _read(function: Any, met: dict[int, int]) -> Hashable:
    """Return the plain values, and tuples and lists of such, that a function reads as globals and in its closure.

    Also those of functions of its module that it calls. torch's own functions read constants.
    """
    if not isinstance(function, FunctionType) or id(function) in met or str(function.__module__).startswith("torch."):
        return None
    met[id(function)] = len(met)
    codes, found = [function.__code__], list[Hashable]()
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    read = {name for code in codes for name in code.co_names}
    values = [(name, function.__globals__[name]) for name in sorted(read & function.__globals__.keys())]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values += [(name, cell.cell_contents) for name, cell in cells if cell != CellType()]
    for name, value in values:
        if isinstance(value, FunctionType):
            own = value.__module__ == function.__module__ or is_own(value)
            found.append((name, _read(value, met) if own else None))
            continue
        held = _entries(value, read)
        if len(held) <= _ENTRIES:
            found.append((name, tuple((_value(k, met), _value(v, met)) for k, v in held if type(v) in _PLAIN)))
    return tuple(found)


def _entries(value: Any, read: set[str]) -> list[tuple[Any, Any]]:
    """Return what a container, an object of attributes, or a module (of these names) holds; else the value itself."""
    if isinstance(value, ModuleType):
        return [(name, vars(value)[name]) for name in sorted(read & vars(value).keys())]
    kind: Any = type(value)
    held = vars(value) if _has_only_attributes(kind) else value
    if isinstance(held, dict):
        return list(held.items())
    return list(enumerate(held)) if isinstance(held, (tuple, list)) else [(None, held)]


class _Attributes:
    pass


@cache
def _has_only_attributes(kind: type) -> bool:
    """Whether objects of a class have nothing but their `__dict__`."""
    plain = kind.__basicsize__ == _Attributes.__basicsize__ and not kind.__itemsize__
    return plain and kind.__dictoffset__ == _Attributes.__dictoffset__


class _Same:
    """Equal for the same object only, which it keeps alive."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)
