"""The proved graphs of this process, by what they compute; and what graphs of a model are known by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree

T = TypeVar("T")

_MOST = 32
_known: OrderedDict[Hashable, Any] = OrderedDict()

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def get(key: Hashable, make: Callable[[], T]) -> T:
    """Return the program of a key; make it if there is none.

    The key is what the captured graph computes. So a model gets a graph that was captured of itself, whatever its code
    reads; equal models, as in a sweep, share the proof of theirs and what torch.compile made of it.
    """
    if key not in _known:
        _known[key] = make()
        if len(_known) > _MOST:
            _known.popitem(last=False)
    _known.move_to_end(key)
    program: T = _known[key]
    return program


def structure(batch: Tree) -> Hashable:
    """Return the form of a batch: its containers, and shape, dtype and device of one example of each tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[1:], batch.dtype, batch.device
    found = batches.parts(batch)
    return type(batch), found and (tuple(found.names), tuple(map(structure, found.values)))


def python_state(roots: Sequence[Any]) -> Hashable:
    """Return what modules' code may read and a user may change: modes, plain attributes, hooks, and tensors' shapes.

    A proof holds for these shapes: a new buffer with a row for each place in the batch would tell the examples apart.
    """
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
            for value in (*module._buffers.values(), *module._parameters.values()):
                # Of the model's own tensors the values are inputs of the graph; those of a loss are constants in it.
                own = value if root is roots[0] else None
                found.append(_Same(value) if own is None else (own.shape, own.dtype))
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


class _Same:
    """Equal for the same object only, which it keeps alive."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)
